"""``OneShotExecutor``: answers each request completely in one step.

From: vLLM-Omni design document, section 9.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
from vllm.model_executor.models.registry import ModelRegistry
from vllm.v1.core.sched.output import NewRequestData, SchedulerOutput
from vllm.v1.outputs import ModelRunnerOutput

from vllm_omni.messages.denoise_step import make_output
from vllm_omni.messages.failure import Failure, make_failure
from vllm_omni.messages.payload import Payload, decode
from vllm_omni.messages.stage_step import STAGE_ARGS
from vllm_omni.model_executor.generation_model import GenerationModel
from vllm_omni.model_executor.stage_device import select_device
from vllm_omni.model_executor.workerless_executor import WorkerlessExecutor


class OneShotExecutor(WorkerlessExecutor):
    """Runs a ``GenerationModel``."""

    def _load_model(self) -> None:
        device = select_device(self.parallel_config)
        model_config = self.model_config
        model_cls, _ = ModelRegistry.resolve_model_cls(model_config.architectures, model_config)
        model = model_cls(vllm_config=self.vllm_config)
        assert isinstance(model, GenerationModel), f"{model_cls.__name__} is not a GenerationModel"
        model.load_weights(DefaultModelLoader(self.load_config).get_all_weights(model_config, model))
        self.model: GenerationModel = model.to(device).eval()

    def _networks(self) -> Iterable[nn.Module]:
        return [self.model]

    def _execute(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        requests = scheduler_output.scheduled_new_reqs
        answers, failures = self._answer(requests)
        return make_output([one.req_id for one in requests], answers, ended=answers.keys(), failures=failures)

    @torch.inference_mode()
    def _answer(self, requests: Sequence[NewRequestData]) -> tuple[dict[str, Payload], dict[str, Failure]]:
        failures: dict[str, Failure] = {}
        batch: dict[str, Any] = {}
        for request in requests:
            params = request.sampling_params
            args = (params.extra_args or {}).get(STAGE_ARGS, {}) if params is not None else {}
            payloads: list[Payload] = []
            try:
                payloads = [decode(data) for data in args.get("payloads", ())]
                trees = [self.hub.pull_blocking(payload) for payload in payloads]
                batch[request.req_id] = self.model.read({**args, "payloads": trees} if payloads else args)
            except Exception as exc:  # the request fails, the engine core must continue
                failures[request.req_id] = make_failure(request.req_id, exc)
            for payload in payloads:
                self.hub.release_payload(payload)
        return self._generate(batch, failures), failures

    def _generate(self, batch: Mapping[str, Any], failures: dict[str, Failure]) -> dict[str, Payload]:
        if not batch:
            return {}
        try:
            outputs = self.model.generate(list(batch.values()))
        except Exception as exc:  # as above; the other requests of the batch are tried alone
            if len(batch) == 1:
                failures |= {request_id: make_failure(request_id, exc) for request_id in batch}
                return {}
            return {key: one for item in batch.items() for key, one in self._generate(dict([item]), failures).items()}
        return {
            request_id: self.hub.publish(request_id, tensors)
            for request_id, tensors in zip(batch, outputs, strict=True)
        }
