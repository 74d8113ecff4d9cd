"""``GenerationExecutor``: runs a ``GenerationModel``, which answers each request in one step or frame by frame.

From: vLLM-Omni design document, section 9.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import nn
from vllm.config.load import LoadConfig
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
from vllm.model_executor.models.registry import ModelRegistry
from vllm.v1.core.sched.output import NewRequestData, SchedulerOutput
from vllm.v1.outputs import ModelRunnerOutput

from vllm_omni.errors import RelayBroken
from vllm_omni.messages.denoise_step import make_output
from vllm_omni.messages.failure import Failure, make_failure
from vllm_omni.messages.payload import Payload, decode
from vllm_omni.messages.stage_step import Readers, StreamSchedulerOutput, StreamUpdate, readers_of, stage_args
from vllm_omni.model_executor.generation_model import GenerationModel
from vllm_omni.model_executor.shared_weights import shared_weights
from vllm_omni.model_executor.stage_device import select_device
from vllm_omni.model_executor.workerless_executor import WorkerlessExecutor
from vllm_omni.process.shared_weights import SHARED_WEIGHTS


class _Open(NamedTuple):
    """A request that has not ended."""

    read: Any  # what the model has made of it
    readers: Readers


class GenerationExecutor(WorkerlessExecutor):
    """Each step answers the requests that it has: with everything, or with the sound of the frames that arrived."""

    def _load_model(self) -> None:
        device = select_device(self.parallel_config)
        model_config = self.model_config
        model_cls, _ = ModelRegistry.resolve_model_cls(model_config.architectures, model_config)
        model = model_cls(vllm_config=self.vllm_config)
        assert isinstance(model, GenerationModel), f"{model_cls.__name__} is not a GenerationModel"
        if self.vllm_config.additional_config.get(SHARED_WEIGHTS):
            self._share_weights(model)
        else:
            self._load_weights(model, self.load_config)
        self.model: GenerationModel = model.to(device).eval()
        self.model.prepare()
        self._open: dict[str, _Open] = {}

    def _load_weights(self, model: GenerationModel, load_config: LoadConfig) -> None:
        model.load_weights(DefaultModelLoader(load_config).get_all_weights(self.model_config, model))

    def _share_weights(self, model: GenerationModel) -> None:
        """Load and publish the weights, or adopt what another engine has published (``SharedWeightsLoader``)."""
        weights = shared_weights(self.vllm_config)
        with weights.claim() as must_load:
            if must_load:
                weights.prepare(model)
                self._load_weights(model, replace(self.load_config, load_format="safetensors"))
                weights.publish(model)
            else:
                weights.adopt(model)

    def _networks(self) -> Iterable[nn.Module]:
        return [self.model]

    def _num_state_bytes(self) -> int:
        return self.model.num_state_bytes

    @torch.inference_mode()
    def _execute(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        # First, because an id may be aborted and submitted again within one step.
        for request_id in scheduler_output.finished_req_ids:
            if (ended := self._open.pop(request_id, None)) is not None:
                self.model.release(ended.read)
        failures: dict[str, Failure] = {}
        for request in scheduler_output.scheduled_new_reqs:
            self._read(request, failures)
        updates = scheduler_output.streams if isinstance(scheduler_output, StreamSchedulerOutput) else {}
        for request_id, update in updates.items():
            self._extend(request_id, update, failures)
        scheduled = scheduler_output.num_scheduled_tokens
        batch = {one: self._open[one].read for one in scheduled if one not in failures}
        answers = {
            request_id: self.hub.publish(request_id, tensors, **self._open[request_id].readers)
            for request_id, tensors in self._generate(batch, failures).items()
        }
        continued = {request_id for request_id, update in updates.items() if not update.last}
        return make_output(list(scheduled), answers, ended=answers.keys() - continued, failures=failures)

    def _read(self, request: NewRequestData, failures: dict[str, Failure]) -> None:
        args = stage_args(request.sampling_params)
        payloads: list[Payload] = []
        try:
            payloads = [decode(data) for data in args.get("payloads", ())]
            trees = [self.hub.pull_blocking(payload) for payload in payloads]
            read = self.model.read({**args, "payloads": trees} if payloads else args)
            self._open[request.req_id] = _Open(read, readers_of(args))
        except Exception as exc:  # the request fails, the engine core must continue
            failures[request.req_id] = make_failure(request.req_id, exc)
        for payload in payloads:
            self.hub.release_payload(payload)

    def _extend(self, request_id: str, update: StreamUpdate, failures: dict[str, Failure]) -> None:
        if request_id in failures:
            return
        try:
            if update.error:
                raise RelayBroken(update.error)
            if update.rows is not None:
                self.model.extend(self._open[request_id].read, update.rows)
        except Exception as exc:  # as above
            failures[request_id] = make_failure(request_id, exc)

    def _generate(
        self, batch: Mapping[str, Any], failures: dict[str, Failure]
    ) -> dict[str, Mapping[str, torch.Tensor]]:
        if not batch:
            return {}
        try:
            outputs = self.model.generate(list(batch.values()))
        except Exception as exc:  # as above; the other requests of the batch are tried alone
            if len(batch) == 1:
                failures |= {request_id: make_failure(request_id, exc) for request_id in batch}
                return {}
            return {key: one for item in batch.items() for key, one in self._generate(dict([item]), failures).items()}
        return dict(zip(batch, outputs, strict=True))
