"""The runner of an autoregressive stage: vLLM's V1 runner plus the hooks of ``model_executor.stage_model``.

One class serves CPU and GPU: it is combined with the V1 runner of the platform (see ``worker.py``).
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from vllm.config import CompilationMode
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.distributed.ec_transfer import get_ec_transfer, has_ec_transfer
from vllm.v1.outputs import ECConnectorOutput, ModelRunnerOutput
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from vllm_omni.config.budgets import EPD_CONFIG, encodes_in_thread
from vllm_omni.errors import ConfigError, RelayBroken
from vllm_omni.kv.ec_connector import RelayECConnector
from vllm_omni.messages.canvas_step import Tail
from vllm_omni.messages.epd_step import EncodeBatch, EPDModelRunnerOutput, EPDSchedulerOutput
from vllm_omni.messages.failure import make_failure
from vllm_omni.messages.images import EncodeReport
from vllm_omni.messages.payload import Payload, decode, pack
from vllm_omni.messages.stage_step import StreamSchedulerOutput, stage_args
from vllm_omni.messages.token_step import TokenStep
from vllm_omni.model_executor.frame_publisher import FramePublisher
from vllm_omni.model_executor.row_publisher import RowPublisher
from vllm_omni.model_executor.stage_model import (
    ConsumesPayload,
    Denoises,
    HasOwnPositions,
    PredictsFrames,
    RequestInfo,
    StepRequest,
    WritesPictures,
)
from vllm_omni.relay.hub import process_hub
from vllm_omni.unified.layout import layout_of
from vllm_omni.unified.spans import spans_of_media
from vllm_omni.worker.attention_pieces import build_by_pieces
from vllm_omni.worker.canvases import CanvasRunner, parts_of
from vllm_omni.worker.encoders import Slice, SlicedEncoder, ThreadedEncoder
from vllm_omni.worker.media_pool import MediaPool, open_media_pool
from vllm_omni.worker.step_payloads import publish_frames, publish_pictures
from vllm_omni.worker.step_rows import StepRows
from vllm_omni.worker.token_pictures import PictureTokens

logger = logging.getLogger(__name__)

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import NewRequestData, SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig


class ARModelRunner(GPUModelRunner):
    """Publishes hidden states with the tokens and feeds a model what the previous stage published.

    A request asks for publishing (``extra_args["omni"]["publish"]``), so that text-only answers cost nothing. Rows of
    prompt chunks are kept until the first token, because an output without a token would end vLLM's prefill statistics.

    From: vLLM-Omni design document, section 11; paper, section 3.3.
    """

    use_aux_hidden_state_outputs: bool  # upstream's: whether the model also returns layers before the last

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.hub = process_hub(self.vllm_config.additional_config)
        self.request_infos: dict[str, RequestInfo] = {}
        # Made at load for an engine with budgets; for an instance without, with its first batch of images.
        self.encoder: SlicedEncoder | ThreadedEncoder | None = None
        self.encodes_in_thread = encodes_in_thread(self.vllm_config)
        self._deferred_saves: list[str] = []  # images that the thread encoded, for the EC connector
        self._encode_batch: EncodeBatch | None = None  # in flight
        # On other devices the host's clock sees only launches, and several ranks must stop at the same layer.
        self._is_by_clock = self.device.type == "cpu" and self.parallel_config.tensor_parallel_size == 1
        self._step_started_at = 0.0
        self._encode_report: EncodeReport | None = None  # of a step that is not sampled yet
        self._ec_output: ECConnectorOutput | None = None  # of the same step
        self._encode_times: tuple[float, float] | None = None  # of the same step
        self.media: MediaPool | None = None  # once the model is loaded

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        super().load_model(*args, **kwargs)
        # Looked up once, as isinstance() of a protocol costs microseconds.
        model = self.get_model()
        # vLLM's own layers have none; its worker for the CPU measures encoders of the model with gradients enabled.
        model.requires_grad_(False)
        self.consumer = model if isinstance(model, ConsumesPayload) else None
        self.rows = StepRows(self, model)
        if self.rows.layers:
            if self.use_aux_hidden_state_outputs:
                raise ConfigError("speculative_config: it reads other layers than the model publishes; leave it out")
            # As for EAGLE-3: the model returns these layers beside its last one.
            model.set_aux_hidden_state_layers(self.rows.layers)
            self.use_aux_hidden_state_outputs = True
        self.own_positions = model if isinstance(model, HasOwnPositions) else None
        self.frame_predictor = model if isinstance(model, PredictsFrames) else None
        layout = layout_of(self.model_config.hf_config)
        self.canvases = CanvasRunner(model, self.device, layout) if isinstance(model, Denoises) else None
        self.picture_tokens = PictureTokens(model) if isinstance(model, WritesPictures) else None
        if self.hub.options.edges and get_tensor_model_parallel_rank() == 0:
            self.hub.prepare()
        if self.vllm_config.additional_config.get(EPD_CONFIG) and self.supports_mm_inputs:
            self.encoder = self._make_encoder()  # an encoder that cannot be sliced fails at start, not with a request
        self.media = open_media_pool(self.vllm_config)

    @torch.inference_mode()
    def initialize_kv_cache(self, kv_cache_config: KVCacheConfig, *args: Any, **kwargs: Any) -> None:
        self.rows.allocate(kv_cache_config)
        super().initialize_kv_cache(kv_cache_config, *args, **kwargs)

    @torch.inference_mode()
    def compile_frames(self) -> None:
        """Compile what a talker does behind its language model, where vLLM compiles that."""
        if self.frame_predictor is not None and self.compilation_config.mode != CompilationMode.NONE:
            started = time.perf_counter()
            self.frame_predictor.compile_frames(self.max_num_reqs)
            logger.info("compiling what predicts frames took %.1f s", time.perf_counter() - started)

    # -- start and end of a request -----------------------------------------------------------------------------------

    def _update_states(self, scheduler_output: SchedulerOutput) -> Any:
        # Upstream caches new requests here and drops finished ones. Ours are finished first, because an id may be
        # aborted and submitted again within one step.
        for request_id in scheduler_output.finished_req_ids:
            info = self.request_infos.pop(request_id, None)
            if info is not None and info.publisher is not None:
                info.publisher.finish()
        if self.canvases is not None:
            self.canvases.remove(scheduler_output.finished_req_ids)
        for request in scheduler_output.scheduled_new_reqs:
            if request.req_id not in self.request_infos:
                self._open_request(request)
        if isinstance(scheduler_output, StreamSchedulerOutput):
            self._extend_requests(scheduler_output)
            self._set_tails(scheduler_output.tails)
        return super()._update_states(scheduler_output)

    def _set_tails(self, tails: Mapping[str, Tail]) -> None:
        """Take the ends of sequences that are not what was sampled here."""
        for request_id, tail in tails.items():
            state, end = self.requests[request_id], tail.start + len(tail.ids)
            state.output_token_ids[tail.start - state.num_prompt_tokens :] = tail.ids
            if (row := self.input_batch.req_id_to_index.get(request_id)) is not None:
                self.input_batch.token_ids_cpu[row, tail.start : end] = tail.ids
                self.input_batch.is_token_ids[row, tail.start : end] = True
                self.input_batch.num_tokens_no_spec[row] = end
            if self.canvases is not None:
                self.canvases.note_tail(request_id, tail)

    def _open_request(self, request: NewRequestData) -> None:
        params = request.sampling_params
        args = stage_args(params)
        if not args:
            return
        assert request.prompt_token_ids is not None, "a stage request always has prompt ids"
        assert params is not None
        info = RequestInfo(
            request.req_id,
            len(request.prompt_token_ids),
            args,
            params,
            prompt_token_ids=request.prompt_token_ids,
            mm_features=request.mm_features,
        )
        if args.get("publish"):
            publisher_cls = RowPublisher if self.frame_predictor is None else FramePublisher
            info.publisher = publisher_cls(self.hub, request.req_id, args.get("readers", []))
        self.request_infos[request.req_id] = info
        if self.canvases is not None:
            self.canvases.add(info)
        if "payloads" in args and self.consumer is not None:
            payloads = []
            try:
                payloads = [decode(data) for data in args["payloads"]]
                self.consumer.load_request(info, [self.hub.pull_blocking(payload) for payload in payloads])
                if not any(payload.streams for payload in payloads):
                    self.consumer.extend_request(info, None, last=True)
            except Exception as exc:  # only the request may fail: an exception here would end the engine
                info.error = make_failure(info.request_id, exc)
            for payload in payloads:
                self.hub.release_payload(payload)
            args["payloads"] = ()  # the rows are loaded; the bytes would stay until the request ends

    def _extend_requests(self, scheduler_output: StreamSchedulerOutput) -> None:
        for request_id, update in scheduler_output.streams.items():
            info = self.request_infos[request_id]
            if info.error or self.consumer is None:
                continue
            try:
                if update.error:
                    raise RelayBroken(update.error)
                self.consumer.extend_request(info, update.rows, update.last)
            except Exception as exc:  # see _open_request
                info.error = make_failure(info.request_id, exc)

    def _init_mrope_positions(self, req_state: Any) -> None:
        # Upstream derives positions from the prompt's own ids and media; a talker uses those of the thinker's prompt.
        info = self.request_infos.get(req_state.req_id)
        if info is None or info.error or self.own_positions is None:
            super()._init_mrope_positions(req_state)
            return
        req_state.mrope_positions, req_state.mrope_position_delta = self.own_positions.init_mrope_positions(info)

    def _calc_mrope_positions(self, scheduler_output: SchedulerOutput) -> None:
        super()._calc_mrope_positions(scheduler_output)
        for info, start, num_tokens, offset in self._step_requests(scheduler_output) if self.own_positions else ():
            # Upstream counts up behind the prompt, where the model may have positions of its own.
            positions = self.requests[info.request_id].mrope_positions
            first, end = max(start, info.num_prompt_tokens), min(start + num_tokens, positions.shape[1])
            if first < end:
                place = slice(offset + first - start, offset + end - start)
                self.mrope_positions.cpu[:, place] = positions[:, first:end]

    # -- one step -----------------------------------------------------------------------------------------------------

    def _step_requests(self, scheduler_output: SchedulerOutput) -> list[StepRequest]:
        """List the stage requests of this step in the order of the batch's flat token dimension."""
        step, offset = [], 0
        for index, request_id in enumerate(self.input_batch.req_ids):
            num_tokens = scheduler_output.num_scheduled_tokens[request_id]
            info = self.request_infos.get(request_id)
            if info is not None and not info.error:
                start = int(self.input_batch.num_computed_tokens_cpu[index])
                step.append(StepRequest(info, start, num_tokens, offset))
            offset += num_tokens
        return step

    def _prepare_inputs(self, scheduler_output: SchedulerOutput, *args: Any, **kwargs: Any) -> Any:
        steps = scheduler_output.canvases if isinstance(scheduler_output, StreamSchedulerOutput) else {}
        if self.canvases is not None:
            for request_id, token in self.canvases.ends_of_texts(steps):
                self.requests[request_id].output_token_ids[-1] = token
                row = self.input_batch.req_id_to_index[request_id]
                self.input_batch.token_ids_cpu[row, steps[request_id].num_context - 1] = token
        prepared = super()._prepare_inputs(scheduler_output, *args, **kwargs)
        if self.canvases is not None:
            ids = self.input_batch.req_ids
            starts = self.input_batch.num_computed_tokens_cpu[: len(ids)].tolist()
            layout, scheduled = self.canvases.layout, scheduler_output.num_scheduled_tokens
            spans = {one: spans_of_media(self.requests[one].mm_features, layout) for one in ids}
            self.canvases.parts = parts_of(ids, scheduled, starts, spans, steps, layout)
            for row, request_id in enumerate(ids):
                if request_id in steps:  # upstream would sample a token behind the step's last one
                    self.discard_request_mask.np[row] = True
            self.discard_request_mask.copy_to_gpu(len(ids))
        if self.picture_tokens is not None:
            step = scheduler_output.token_step if isinstance(scheduler_output, StreamSchedulerOutput) else TokenStep()
            self.picture_tokens.start_step(step, self.input_batch.req_id_to_index, self.request_infos)
            self.discard_request_mask.np[self.picture_tokens.alone] = True
            self.discard_request_mask.copy_to_gpu(self.input_batch.num_reqs)
        return prepared

    def _build_attention_metadata(self, *args: Any, **kwargs: Any) -> Any:
        metadata, drafted = super()._build_attention_metadata(*args, **kwargs)
        if self.canvases is not None and self.canvases.parts and self.canvases.needs_pieces:
            metadata = build_by_pieces(self, metadata, [part.pieces() for part in self.canvases.parts])
        return metadata, drafted

    def _preprocess(self, scheduler_output: SchedulerOutput, *args: Any, **kwargs: Any) -> Any:
        # Upstream builds the step's embeddings in a buffer that it rewrites each step, so changing it in place is safe.
        inputs = super()._preprocess(scheduler_output, *args, **kwargs)
        if self.consumer is not None and (step := self._step_requests(scheduler_output)):
            num_tokens = scheduler_output.total_num_scheduled_tokens
            assert inputs[1] is not None, "a stage that consumes payloads runs with enable_prompt_embeds"
            self.consumer.preprocess(step, self.input_ids.gpu[:num_tokens], inputs[1][:num_tokens])
        if self.canvases is not None and self.canvases.parts:
            ids, embeds, positions, intermediate, more, ec_output = inputs
            positions, own = self.canvases.fill(embeds, positions)
            return ids, embeds, positions, intermediate, {**more, **own}, ec_output
        return inputs

    def execute_model(self, scheduler_output: SchedulerOutput, *args: Any, **kwargs: Any) -> Any:
        # The EC connector spans the whole step, with tokens or without. Upstream opens it in front of a forward, where
        # images encoded beside the forward would be reported a step late.
        self._step_started_at = time.perf_counter()
        with self._ec_connector(scheduler_output) as ec_output:
            output = super().execute_model(scheduler_output, *args, **kwargs)
            if isinstance(scheduler_output, EPDSchedulerOutput):
                # After the forward: upstream has freed the step's own list before it.
                for identifier in scheduler_output.free_behind_forward:
                    self.encoder_cache.pop(identifier, None)
                self._encode_report = self._encode_beside(scheduler_output)
        self._ec_output = ec_output
        return output if output is None else self._with_report(output)

    def _ec_connector(self, step: SchedulerOutput) -> AbstractContextManager[ECConnectorOutput | None]:
        if not has_ec_transfer() or not isinstance(get_ec_transfer(), RelayECConnector):
            return nullcontext()
        return super().maybe_get_ec_connector_output(step, encoder_cache=self.encoder_cache)

    def maybe_get_ec_connector_output(
        self, scheduler_output: SchedulerOutput, encoder_cache: dict[str, torch.Tensor], **kwargs: Any
    ) -> AbstractContextManager[ECConnectorOutput | None]:
        if has_ec_transfer() and isinstance(get_ec_transfer(), RelayECConnector):
            return nullcontext()
        return super().maybe_get_ec_connector_output(scheduler_output, encoder_cache, **kwargs)

    def sample_tokens(self, grammar_output: Any) -> Any:
        # Upstream consumes execute_model_state, and the next step overwrites the hidden states: read them first.
        payloads = self._publish_rows() | {
            info.request_id: pack(Payload(values=info.error.report))
            for info in self.request_infos.values()
            if info.error
        }
        state = self.execute_model_state
        if self.picture_tokens is not None and state is not None:
            self.picture_tokens.write_logits(state.logits, state.sample_hidden_states)
        held = self._hold_generators()
        try:
            output = super().sample_tokens(grammar_output)
        finally:
            self.input_batch.generators.update(held)
        if self.canvases is not None and state is not None:
            payloads |= publish_pictures(self.canvases, output, state.hidden_states, self.hub, self.request_infos)
        if self.frame_predictor is not None and state is not None:
            payloads |= publish_frames(self.frame_predictor, output, state.sample_hidden_states, self.request_infos)
        if payloads:
            assert isinstance(output, ModelRunnerOutput), "stages that publish rows run without async scheduling"
            output.pooler_output = [payloads.get(request_id) for request_id in output.req_ids]
        return output if output is None else self._with_report(output)

    def _sample(self, *args: Any, **kwargs: Any) -> Any:
        # Upstream notes the sampled tokens for the next step right behind this.
        output = super()._sample(*args, **kwargs)
        if self.picture_tokens is not None:
            self.picture_tokens.copy_to_partners(output.sampled_token_ids)
        return output

    def _hold_generators(self) -> dict[int, torch.Generator]:
        """Keep the generators of rows whose token is discarded, as their prompt is not complete, out of the step.

        Upstream samples with them and then sets their offset back, which a CPU's generator does not support: one seeded
        prompt in chunks would end the engine.
        """
        generators = self.input_batch.generators
        if self.device.type != "cpu" or not generators:
            return {}
        discarded = self.discard_request_mask.np[: self.input_batch.num_reqs]
        return {row: generators.pop(row) for row in list(generators) if discarded[row]}

    # -- images encoded beside the language model ---------------------------------------------------------------------

    def _encode_beside(self, step: EPDSchedulerOutput) -> EncodeReport | None:
        if step.encodes:
            batch = EncodeBatch(step.encodes, step.ec_manager_metadata)
            self._encode_batch = batch
            self.encoder = self.encoder or self._make_encoder()
            self.encoder.start(lambda: self._execute_mm_encoder(batch) and None)
        if self._encode_batch is None:
            return None  # the batch has ended, and its report has not reached the scheduler
        assert self.encoder is not None
        images = [item.feature.identifier for item in self._encode_batch.items]
        try:
            done = self._advance(self.encoder, step)
        except Exception as exc:  # only the request may fail: an exception here would end the engine
            logger.error("images %s cannot be encoded", ", ".join(images), exc_info=exc)
            self._drop_batch()
            return EncodeReport([], 0, 1, 0.0, dict.fromkeys(images, str(exc)))
        report = EncodeReport([], done.num_layers, self.encoder.num_layers_of_batch, done.seconds)
        report.loaded = self.media.loaded if self.media is not None else frozenset()
        if done.has_ended:
            report.encoded = images
            self._save_deferred()
            self._drop_batch()
        return report

    def _drop_batch(self) -> None:
        self._encode_batch = None
        self._deferred_saves.clear()
        if self.media is not None:
            self.media.forget()

    def _advance(self, encoder: SlicedEncoder | ThreadedEncoder, step: EPDSchedulerOutput) -> Slice:
        if isinstance(encoder, ThreadedEncoder):
            return encoder.poll()
        if step.max_seconds is not None and self._is_by_clock:
            return encoder.resume(None, until=self._step_started_at + step.max_seconds)
        return encoder.resume(step.num_encode_layers)

    def maybe_save_ec_to_connector(self, encoder_cache: dict[str, torch.Tensor], mm_hash: str) -> None:
        # The connector may be used by the thread of the steps only.
        if self.encodes_in_thread and threading.current_thread() is not threading.main_thread():
            self._deferred_saves.append(mm_hash)
        else:
            super().maybe_save_ec_to_connector(encoder_cache, mm_hash)

    def _save_deferred(self) -> None:
        for mm_hash in self._deferred_saves:
            super().maybe_save_ec_to_connector(self.encoder_cache, mm_hash)
        self._deferred_saves.clear()

    def _make_encoder(self) -> SlicedEncoder | ThreadedEncoder:
        if self.lora_config and self.lora_manager.supports_tower_connector_lora():
            raise ConfigError("epd: adapters of an image encoder are set per step, which sliced encodes do not support")
        if self.encodes_in_thread:
            return ThreadedEncoder()
        model = self.get_model()
        return SlicedEncoder(model.get_submodule(name) for name in model._tower_model_names)

    def _with_report(self, output: Any) -> Any:
        report, self._encode_report = self._encode_report, None
        times, self._encode_times = self._encode_times, None
        ec_output, self._ec_output = self._ec_output, None
        has_ec_output = ec_output is not None and not ec_output.is_empty()
        counts = self.media.take_counts() if self.media is not None else None
        if report is None and times is None and not has_ec_output and counts is None:
            return output
        if report is None and not has_ec_output and not isinstance(output, ModelRunnerOutput):
            return output  # of an asynchronous runner, where the times are unknown
        assert isinstance(output, ModelRunnerOutput), "stages with budgets run without asynchronous runner outputs"
        values = dict(vars(output))  # a copy, as upstream shares its empty output
        if has_ec_output:
            values["ec_connector_output"] = ec_output
        return EPDModelRunnerOutput(**values, encode_report=report, encode_times=times, media_counts=counts)

    def _execute_mm_encoder(self, scheduler_output: Any) -> Any:
        if not scheduler_output.scheduled_encoder_inputs:  # none, or a batch beside the language model
            return super()._execute_mm_encoder(scheduler_output)
        started_at = time.time()
        outputs = super()._execute_mm_encoder(scheduler_output)
        if self.device.type == "cpu":  # on other devices, kernels were only launched
            self._encode_times = started_at, time.time()
        return outputs

    def _batch_mm_inputs_from_scheduler(self, scheduler_output: Any) -> Any:
        # Upstream finds a step's images by their requests, which may still wait when theirs are encoded here.
        if isinstance(scheduler_output, EncodeBatch):
            batch = scheduler_output.inputs()
        else:
            batch = super()._batch_mm_inputs_from_scheduler(scheduler_output)
        if self.media is None:
            return batch
        found, rest = self.media.split(batch)
        for identifier, embeds in found.items():
            metadata, freed = scheduler_output.ec_manager_metadata, scheduler_output.free_encoder_mm_hashes
            super()._cache_encoder_output(identifier, embeds.to(self.device), metadata, freed)
        return rest

    def _cache_encoder_output(self, mm_hash: str, output: torch.Tensor, *args: Any) -> None:
        super()._cache_encoder_output(mm_hash, output, *args)
        if self.media is not None:
            self.media.keep(mm_hash, output)

    def reset_encoder_cache(self) -> None:
        # The weights change: the batch in flight has the old ones. The scheduler has dropped it, too.
        if self.encoder is not None:
            self.encoder.cancel()
            self._drop_batch()
        if has_ec_transfer() and isinstance(connector := get_ec_transfer(), RelayECConnector):
            connector.forget_wanted()
        super().reset_encoder_cache()

    def shutdown(self) -> None:
        if self.media is not None:
            self.media.close()
        super().shutdown()

    def _publish_rows(self) -> dict[str, torch.Tensor]:
        """Publish the rows that this step completed: request id -> packed payload."""
        state = self.execute_model_state
        if state is None:
            return {}
        requests = self._step_requests(state.scheduler_output)
        step = [one for one in requests if isinstance(one.info.publisher, RowPublisher)]
        if not step and self.rows.cache is None:
            return {}
        # Every rank computes, as the embedding is vocabulary-parallel; only rank 0 publishes.
        rows = self.rows.finish(state)
        if get_tensor_model_parallel_rank() != 0:
            return {}
        payloads = {}
        for one in step:
            info = one.info
            publisher = self.rows.add_to_publisher(rows, one)
            if one.start + one.num_tokens >= info.num_prompt_tokens:
                payload = publisher.publish(partial(self._positions, info))
                if payload is not None:
                    payloads[info.request_id] = pack(payload)
        return payloads

    def _positions(self, info: RequestInfo) -> dict[str, torch.Tensor]:
        """The positions of the prompt, where they do not follow from its ids alone."""
        if not self.uses_mrope:
            return {}
        positions = self.requests[info.request_id].mrope_positions[:, : info.num_prompt_tokens]
        return {"positions": positions.to(torch.int32)}
