"""``MultimodalOutputProcessor``: joins the tokens and tensors of one engine step in one output.

From: vLLM-Omni design document, sections 12 and 13.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from vllm.outputs import PoolingRequestOutput, RequestOutput
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest
from vllm.v1.engine.output_processor import OutputProcessor, OutputProcessorOutput, RequestState

from vllm_omni.engine.stage_log import RESULTS
from vllm_omni.errors import RelayError
from vllm_omni.messages.failure import make_failure
from vllm_omni.messages.outputs import OmniRequestOutput, merge_multimodal
from vllm_omni.messages.payload import NUM_CACHED, Payload, decode, unpack
from vllm_omni.messages.slo import SLO_ARGS
from vllm_omni.messages.stage_step import stage_args
from vllm_omni.messages.timeline import TIMELINE, TaskNotes, Timeline
from vllm_omni.relay.hub import RelayHub
from vllm_omni.vllm_patches import extend_request_state

MEDIA_MISSING = "its engine does not have media that were prepared for an earlier request; send the request again"

Handler = Callable[[Payload, OmniRequestOutput, RelayHub], None]
"""Puts one payload of the engine into the output that goes to the stage's caller."""


def forward_references(payload: Payload, output: OmniRequestOutput, hub: RelayHub) -> None:
    """Pass references to hidden states and latents on; the front end does not fetch these."""
    output.payloads.append(payload)


def open_media(payload: Payload, output: OmniRequestOutput, hub: RelayHub) -> None:
    """Fetch audio, images or video, and the request's progress; the user gets tensors that it owns.

    ``images`` [N, H, W, C] and ``frames`` [N, T, H, W, C], uint8 or float32 as requested; ``audio``, with
    ``sample_rate`` in Hz; ``latents``; ``preview`` [H, W, 3], uint8; ``step`` of ``num_steps``.
    """
    media = hub.pull_blocking(payload)
    merge_multimodal(
        output.multimodal_output,
        {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in media.items()},
    )
    hub.release_payload(payload)


def open_and_forward(payload: Payload, output: OmniRequestOutput, hub: RelayHub) -> None:
    """Fetch media that another stage reads, too."""
    open_media(payload, output, hub)
    if payload.tensors:
        output.payloads.append(payload)


HANDLERS: Mapping[str, Handler] = {
    "text": forward_references,
    "latents": forward_references,
    "audio": open_media,
    "image": open_media,
    "text+image": open_media,  # the text is upstream's
    "video": open_media,
}
"""By a stage's output type; a new type is added here."""


class OmniRequestState(RequestState):
    """Keeps the payloads that arrived since the last output, and attaches them to the next one."""

    handler: Handler
    hub: RelayHub
    new_payloads: list[Payload]
    is_watched: bool  # whether to record the times of its tokens
    num_received: int  # tokens, or, of a stage without, pieces of media

    def _new_request_output(self, *args: Any, **kwargs: Any) -> RequestOutput | PoolingRequestOutput[Any]:
        output = super()._new_request_output(*args, **kwargs)
        assert isinstance(output, RequestOutput), "payloads are taken out before upstream makes a pooling output"
        omni = OmniRequestOutput.of(output)
        for payload in self.new_payloads:
            if "error" in payload.values:
                omni.multimodal_output.update(payload.values)
            else:
                self._handle(payload, omni)
        self.new_payloads = []
        return omni

    def _handle(self, payload: Payload, output: OmniRequestOutput) -> None:
        """An error that left this method would end all requests of the engine, and the engine."""
        try:
            self.handler(payload, output, self.hub)
        except RelayError as exc:
            output.multimodal_output.update(make_failure(self.external_req_id, exc).report)


class MultimodalOutputProcessor(OutputProcessor):
    """vLLM's output processor for stages whose steps yield tokens, tensors or both.

    Upstream treats a step with a tensor as the end of a pooling request and drops its tokens; here the tensor is taken
    out first, and upstream's output of the tokens carries it. A reader slower than the engine gets merged outputs
    (``OmniRequestOutput.add``), so no chunk is lost.

    Args:
        hub: fetches media for the user.
        published: receives the payloads of each request, by its external id; the caller that takes them out releases
            them. A reader that leaves early has not seen all of its outputs.
        notes: likewise receives the times of each request.
        num_results: counts the results, by their name in a payload: one for each picture, video or piece of sound.
        has_slo: whether the deployment has latency targets, so that every request is watched.
        clock: the engine's (``StreamScheduler.clock``).

    Attributes:
        num_cached_rows: rows that were published for tokens found in the prefix cache.
    """

    def __init__(
        self,
        upstream: OutputProcessor,
        output_type: str,
        hub: RelayHub,
        published: dict[str, list[Payload]] | None = None,
        notes: dict[str, TaskNotes] | None = None,
        *,
        num_results: Counter[str] | None = None,
        has_slo: bool = False,
        clock: Callable[[], float] = time.time,
    ) -> None:
        super().__init__(
            upstream.tokenizer,
            log_stats=upstream.log_stats,
            stream_interval=upstream.stream_interval,
            tracing_enabled=upstream.tracing_enabled,
            admission_stats=upstream.admission_stats,
        )
        self.handler = HANDLERS[output_type]
        self.hub = hub
        self.published = {} if published is None else published
        self.notes = {} if notes is None else notes
        self._num_results: Counter[str] = Counter() if num_results is None else num_results
        self._has_slo = has_slo
        self._clock = clock
        self.num_cached_rows = 0

    def add_request(self, request: EngineCoreRequest, prompt: str | None, *args: Any, **kwargs: Any) -> None:
        super().add_request(request, prompt, *args, **kwargs)
        upstream = self.request_states[request.request_id]
        if not isinstance(upstream, OmniRequestState):
            state = extend_request_state(upstream, OmniRequestState)
            state.handler, state.hub, state.new_payloads, state.num_received = self.handler, self.hub, [], 0
            params = request.sampling_params
            own = stage_args(params)
            if own.get("publish") and self.handler is open_media:
                state.handler = forward_references if own.get("unopened") else open_and_forward
            state.is_watched = self._has_slo or bool(params is not None and (params.extra_args or {}).get(SLO_ARGS))

    def process_outputs(
        self, engine_core_outputs: list[EngineCoreOutput], *args: Any, **kwargs: Any
    ) -> OutputProcessorOutput:
        now = self._clock()
        for output in engine_core_outputs:
            state = self.request_states.get(output.request_id)
            assert state is None or isinstance(state, OmniRequestState)
            if state is not None:
                state.num_received += len(output.new_token_ids) or output.pooling_output is not None
            self._note_times(output, state, now)
            for payload in _announced(output):
                self._take(payload, state)
            if output.mm_cache_miss_hashes and state is not None:
                state.new_payloads.append(Payload(values={"error": MEDIA_MISSING, "retry": True}))
            if output.pooling_output is not None:
                assert isinstance(output.pooling_output, torch.Tensor)
                payload = unpack(output.pooling_output)
                self.num_cached_rows += payload.values.get(NUM_CACHED, 0)
                output.pooling_output = None
                self._take(payload, state)
                if state is not None:
                    state.new_payloads.append(payload)
        return super().process_outputs(engine_core_outputs, *args, **kwargs)

    def num_received(self, request_id: str) -> dict[str, int]:
        """How many outputs have come for a request, by the engine's id of each of its sequences that runs.

        Args:
            request_id: the external one.
        """
        received = {}
        for one in self.external_req_ids.get(request_id, ()):
            if (state := self.request_states.get(one)) is not None:
                assert isinstance(state, OmniRequestState)
                received[one] = state.num_received
        return received

    def _take(self, payload: Payload, state: OmniRequestState | None) -> None:
        if state is None:  # the request was aborted meanwhile
            self.hub.release_payload(payload, for_all=True)
        elif payload.refs():
            self.published.setdefault(state.external_req_id, []).append(payload)
            for name in RESULTS.keys() & payload.tensors.keys():
                self._num_results[name] += 1 if name == "audio" else payload.tensors[name].shape[0]

    def _note_times(self, output: EngineCoreOutput, state: OmniRequestState | None, now: float) -> None:
        """Record when tokens arrived, and the engine's timeline, which the user must not see."""
        packed = None
        if output.kv_transfer_params is not None:
            packed = output.kv_transfer_params.pop(TIMELINE, None)
            output.kv_transfer_params = output.kv_transfer_params or None
        is_timed = state is not None and state.is_watched and bool(output.new_token_ids)
        if state is None or not (packed or is_timed):
            return
        notes = self.notes.setdefault(state.external_req_id, TaskNotes())
        if packed is not None:
            timeline = Timeline.unpack(packed)
            known = notes.timelines.setdefault(state.request_id, Timeline(timeline.task))
            known.marks += timeline.marks
        if is_timed:
            notes.token_times.append((state.request_index, len(output.new_token_ids), now))


def _announced(output: EngineCoreOutput) -> Iterator[Payload]:
    """Caches that the engine's connectors have published for another instance: a KV cache, embeddings of images."""
    packed = [] if output.kv_transfer_params is None else [output.kv_transfer_params.get("pages")]
    if output.ec_transfer_params is not None:
        packed += (output.ec_transfer_params.get("images") or {}).values()
    yield from (decode(one) for one in packed if one is not None)
