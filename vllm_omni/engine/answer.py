"""``Answer``: the outputs that the user receives, made from the frames of a call."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from vllm.outputs import CompletionOutput, RequestOutput

from vllm_omni.engine.latency_metrics import RequestLatency
from vllm_omni.errors import StageFailed
from vllm_omni.flow import ENTRY, OutputFrame, StaticPlan
from vllm_omni.messages.outputs import OmniRequestOutput, copy_completion
from vllm_omni.model_executor.pipeline import Pipeline, RequestContext

EMPTY: Mapping[str, Mapping[str, Any]] = {
    "audio": {"audio": torch.zeros(0)},
    "image": {"images": torch.zeros(0, 0, 0, 3, dtype=torch.uint8)},
    "video": {"frames": torch.zeros(0, 0, 0, 0, 3, dtype=torch.uint8)},
}
"""By a stage's output type: the values of a branch that was not taken, under the keys of one that was."""


class Answer:
    """One request's outputs, and whether all of them have ended.

    Args:
        outputs: the graph output that answers each modality.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        plan: StaticPlan,
        context: RequestContext,
        outputs: Mapping[str, str],
        latency: RequestLatency,
    ) -> None:
        self._pipeline = pipeline
        self._context = context
        self._latency = latency
        self._modality_of = {output: modality for modality, output in outputs.items()}
        self._unfinished = set(outputs)
        self._started = time.monotonic()
        self._has_values: set[str] = set()  # modalities
        types = {spec.name: spec.output_type for spec in pipeline.stages}
        edges = {modality: plan.outputs[output] for modality, output in outputs.items()}
        nodes = {modality: plan.nodes[edge.source] for modality, edge in edges.items()}
        # What a function emits has the modality that the graph declares.
        self._types = {
            modality: types.get(node.role, node.outputs[edges[modality].source_field].modality)
            for modality, node in nodes.items()
        }
        # Where a stage may answer several requests of a call, a finish reason is not yet that of the whole text.
        is_repeated = {
            modality: bool(node.loops_around) or any(edge.source != ENTRY for edge in node.slots)
            for modality, node in nodes.items()
        }
        self._text = _Text(is_repeated.get("text", False))
        self._sources = {modality: edge.source for modality, edge in edges.items()}

    def output_of(self, frame: OutputFrame) -> OmniRequestOutput:
        """Make the user's output of a frame; the last one carries the times of the request."""
        modality = self._modality_of[frame.field]
        if frame.last:
            self._unfinished.discard(modality)
        payload = None if frame.payload is None else self._opened(modality, frame.payload)
        if modality == "text" and payload is not None:
            # Copied: the next stage reads the same object, and the user's copy is merged into.
            output = OmniRequestOutput.of(payload)
            output.request_id = self._context.request_id
            output.prompt_token_ids = self._text.prompt_token_ids_of(payload)
        else:
            prompt_token_ids = self._text.prompt_token_ids
            empty = RequestOutput(self._context.request_id, None, prompt_token_ids, None, outputs=[], finished=False)
            output = OmniRequestOutput.of(empty)
        if modality == "text":
            output.outputs = self._text.completions([] if payload is None else payload.outputs, is_last=frame.last)
        else:
            output.multimodal_output = self._values(modality, payload)
        output.finished = not self._unfinished
        output.stage_durations = dict(self._context.stage_durations)
        if output.finished:
            output.stage_durations["total"] = time.monotonic() - self._started
            output.latency_parts, output.slo_reports = self._latency.end()
        return output

    def _opened(self, modality: str, payload: Any) -> OmniRequestOutput:
        """A stage's output, or that of a function: a text, or values by name as in ``multimodal_output``.

        Raises:
            StageFailed: a function emitted something else.
        """
        if isinstance(payload, OmniRequestOutput):
            return payload
        output = OmniRequestOutput.of(RequestOutput(self._context.request_id, None, None, None, [], finished=False))
        if isinstance(payload, str) and self._types[modality] in ("text", "latents"):
            output.outputs = [CompletionOutput(0, payload, [], None, None)]
        elif isinstance(payload, Mapping) and modality != "text":
            output.multimodal_output = dict(payload)
        else:
            kind, role = type(payload).__name__, self._sources[modality].partition(".")[0]
            raise StageFailed(role, f"emitted a {kind} as {modality!r}: a text, a mapping or an output is needed")
        return output

    def _values(self, modality: str, payload: OmniRequestOutput | None) -> dict[str, Any]:
        """The values of another modality; for a branch that produced none, an empty one."""
        output_type, rate = self._types[modality], self._pipeline.sample_rate
        if modality in self._pipeline.extra_outputs:
            return {modality: [] if payload is None else self._pipeline.extra_output(modality, payload)}
        if output_type in ("text", "latents"):
            return {modality: "" if payload is None else "".join(one.text for one in payload.outputs)}
        if payload is not None:
            self._has_values.add(modality)
            values: Mapping[str, Any] = payload.multimodal_output
        elif modality in self._has_values:
            return {}
        else:
            values = EMPTY.get(output_type.removeprefix("text+"), {})
        return {**values, **({"sample_rate": rate} if rate and output_type == "audio" else {})}


class _Text:
    """The text of one answer, in which several requests of a stage may follow one another."""

    def __init__(self, is_repeated: bool) -> None:
        self.prompt_token_ids: list[int] = []  # of the first one: the user's; a function's text has none
        self._is_repeated = is_repeated
        self._ended: dict[int, CompletionOutput] = {}  # how each choice has ended so far

    def prompt_token_ids_of(self, payload: OmniRequestOutput) -> list[int]:
        self.prompt_token_ids = self.prompt_token_ids or payload.prompt_token_ids or []
        return self.prompt_token_ids

    def completions(self, made: Sequence[CompletionOutput], *, is_last: bool) -> list[CompletionOutput]:
        """The user's copies; of repeated requests, only the end of the last one gives a finish reason."""
        copies = [copy_completion(one) for one in made]
        for one in copies:
            if one.finish_reason is not None:
                logprobs = None if one.logprobs is None else one.logprobs[:0]
                self._ended[one.index] = replace(one, text="", token_ids=[], logprobs=logprobs)
                if self._is_repeated:
                    one.finish_reason = one.stop_reason = None
        if is_last and not self._ended:  # a function's text, or none
            self._ended[0] = CompletionOutput(0, "", [], None, None, finish_reason="stop")
            return self._end(copies)
        return self._end(copies) if is_last and self._is_repeated else copies

    def _end(self, copies: list[CompletionOutput]) -> list[CompletionOutput]:
        of_index = {one.index: one for one in copies}
        for index, ended in self._ended.items():
            one = of_index.setdefault(index, ended)
            one.finish_reason, one.stop_reason = ended.finish_reason, ended.stop_reason
        return list(of_index.values())
