"""``Answer``: the outputs that the user receives, made from the frames of a call."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from vllm.outputs import CompletionOutput, RequestOutput

from vllm_omni.engine.latency_metrics import RequestLatency
from vllm_omni.engine.request_record import RequestRecord
from vllm_omni.errors import StageFailed
from vllm_omni.flow import ENTRY, Field, OutputFrame, StaticPlan
from vllm_omni.flow.graph.plan import NodePlan
from vllm_omni.messages.outputs import OmniRequestOutput, copy_completion
from vllm_omni.messages.stage_output import StageOutput
from vllm_omni.model_executor.pipeline import Pipeline, StageSpec

logger = logging.getLogger(__name__)

EMPTY: Mapping[str, Mapping[str, Any]] = {
    "audio": {"audio": torch.zeros(0)},
    "image": {"images": torch.zeros(0, 0, 0, 3, dtype=torch.uint8)},
    "video": {"frames": torch.zeros(0, 0, 0, 0, 3, dtype=torch.uint8)},
}
"""By kind: the values of a branch that was not taken, under the keys of one that was."""

KEYS: Mapping[str, Sequence[str]] = {
    "audio": ("audio", "sample_rate"),
    "image": ("images",),
    "video": ("frames", "fps", "audio", "sample_rate"),
}
"""By kind: the keys of its values in ``multimodal_output``; the first one names it."""

KINDS = ("text", *EMPTY)
"""Kinds of outputs that a graph may declare; of other fields, the stage says what they have."""


def kind_of(field: Field, spec: StageSpec | None) -> str:
    """What an output has: as the graph declares it, or else as its stage does (None: it is that of a function)."""
    return field.modality if spec is None or field.modality in KINDS else spec.output_type


def kind_of_output(plan: StaticPlan, output: str, specs: Mapping[str, StageSpec]) -> str:
    """The kind of a graph's output.

    Args:
        specs: of the stages, by name.
    """
    edge = plan.outputs[output]
    node = plan.nodes[edge.source]
    return kind_of(node.outputs[edge.source_field], specs.get(node.role))


class Answer:
    """One request's outputs, and whether all of them have ended.

    Two sounds or two pictures of a request stay apart: the modality that is named as their kind, or else the first of
    the pipeline, has the plain keys, ``images``; the others' begin with the name of the modality: ``sketch.images``.

    Args:
        record: what the nodes report.
        outputs: the graph output that answers each modality.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        plan: StaticPlan,
        request_id: str,
        record: RequestRecord,
        outputs: Mapping[str, str],
        latency: RequestLatency,
    ) -> None:
        self._pipeline = pipeline
        self._request_id = request_id
        self._record = record
        self._latency = latency
        self._modality_of = {output: modality for modality, output in outputs.items()}
        self._unfinished = set(outputs)
        self._started = time.monotonic()
        self._has_values: set[str] = set()  # modalities
        specs = {spec.name: spec for spec in pipeline.stages}
        self._kinds = {modality: kind_of_output(plan, output, specs) for modality, output in outputs.items()}
        self._sources = {modality: plan.outputs[output].source for modality, output in outputs.items()}
        self._text = _Text("text" in outputs and _may_repeat(plan.nodes[self._sources["text"]]))
        self._others = {modality: self._values_of_others(modality) for modality in outputs}
        self._owners = _owners_of_keys(pipeline.modalities, self._kinds)

    def _values_of_others(self, modality: str) -> frozenset[str]:
        """The keys in a node's outputs that belong to further modalities of the request."""
        others = {kind for one, kind in self._kinds.items() if self._sources[one] == self._sources[modality]}
        return frozenset(key for kind in others - {self._kinds[modality]} for key in EMPTY.get(kind, ()))

    def output_of(self, frame: OutputFrame) -> OmniRequestOutput:
        """Make the user's output of a frame; the last one carries the times of the request."""
        modality = self._modality_of[frame.field]
        if frame.last:
            self._unfinished.discard(modality)
        payload = None if frame.payload is None else self._opened(modality, frame.payload)
        if modality == "text" and payload is not None:
            output = payload.to_request_output(self._request_id)
            output.prompt_token_ids = self._text.prompt_token_ids_of(payload)
        else:
            prompt_token_ids = self._text.prompt_token_ids
            if payload is not None and self._pipeline.speaks_first:
                prompt_token_ids = self._text.prompt_token_ids_of(payload)
            empty = RequestOutput(self._request_id, None, prompt_token_ids, None, outputs=[], finished=False)
            output = OmniRequestOutput.of(empty)
        if modality == "text":
            output.outputs = self._text.completions([] if payload is None else payload.outputs, is_last=frame.last)
        else:
            output.multimodal_output = self._values(modality, payload)
        output.finished = not self._unfinished
        output.stage_durations = dict(self._record.stage_durations)
        if output.finished:
            self._record.note_answered()
            output.stage_durations["total"] = time.monotonic() - self._started
            output.latency_parts, output.slo_reports = self._latency.end()
        return output

    def _opened(self, modality: str, payload: Any) -> StageOutput:
        """A stage's output, or that of a function: a text, or values by name as in ``multimodal_output``.

        Raises:
            StageFailed: a function emitted something else.
        """
        if isinstance(payload, StageOutput):
            return payload
        if isinstance(payload, str) and self._kinds[modality] in ("text", "latents"):
            return StageOutput(self._request_id, [CompletionOutput(0, payload, [], None, None)])
        if isinstance(payload, Mapping) and modality != "text":
            return StageOutput(self._request_id, multimodal_output=dict(payload))
        kind, role = type(payload).__name__, self._sources[modality].partition(".")[0]
        raise StageFailed(role, f"emitted a {kind} as {modality!r}: a text, a mapping or a StageOutput is needed")

    def _values(self, modality: str, payload: StageOutput | None) -> dict[str, Any]:
        """The values of another modality; for a branch that produced none, an empty one."""
        kind, rate = self._kinds[modality], self._pipeline.sample_rate
        if modality in self._pipeline.extra_outputs:
            return {modality: [] if payload is None else self._extra_output(modality, payload)}
        if kind in ("text", "latents"):
            return {modality: "" if payload is None else "".join(one.text for one in payload.outputs)}
        if payload is not None:
            self._has_values.add(modality)
            made, others = payload.multimodal_output, self._others[modality]
            values: Mapping[str, Any] = {key: value for key, value in made.items() if key not in others}
        elif modality in self._has_values:
            return {}
        else:
            values = EMPTY.get(kind, {})
        values = {**({"sample_rate": rate} if rate and kind == "audio" else {}), **values}
        return {self._key(modality, name): value for name, value in values.items()}

    def _key(self, modality: str, name: str) -> str:
        """The key under which the user gets a value of a modality."""
        main, *_ = KEYS.get(self._kinds[modality], (name,))
        is_taken = self._is_taken(modality, main) or self._is_taken(modality, name)
        return f"{modality}.{name}" if is_taken else name

    def _is_taken(self, modality: str, key: str) -> bool:
        """Whether a key is that of another output; one stage's video and its sound share theirs."""
        owner = self._owners.get(key, modality)
        is_shared = self._sources[owner] == self._sources[modality] and self._kinds[owner] != self._kinds[modality]
        return owner != modality and not is_shared

    def _extra_output(self, name: str, payload: StageOutput) -> Any:
        try:
            return self._pipeline.extra_output(name, payload)
        except Exception as exc:  # not the client's fault, whatever its class
            role = self._sources[name].partition(".")[0]
            logger.exception("request %s: extra_output of %r failed", self._request_id, name)
            raise StageFailed(role, f"the pipeline's extra_output of {name!r} failed: {exc!r}") from exc


class _Text:
    """The text of one answer, in which several requests of a stage may follow one another."""

    def __init__(self, is_repeated: bool) -> None:
        self.prompt_token_ids: list[int] = []  # of the first one: the user's; a function's text has none
        self._is_repeated = is_repeated
        self._ended: dict[int, CompletionOutput] = {}  # how each choice has ended so far

    def prompt_token_ids_of(self, payload: StageOutput) -> list[int]:
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


def _may_repeat(node: NodePlan) -> bool:
    """Whether it may answer several requests of a call: then its finish reason is not yet that of the whole text."""
    return bool(node.loops_around or node.graph) or any(edge.source != ENTRY for edge in node.slots)


def _owners_of_keys(modalities: Iterable[str], kinds: Mapping[str, str]) -> dict[str, str]:
    """Key of an output -> the modality that has it without its name before it.

    Args:
        kinds: of the modalities that are wanted.
    """
    owners: dict[str, str] = {}
    wanted = [modality for modality in modalities if modality in kinds]
    # A video with a sound comes last: "audio" is the speech beside it.
    for modality in sorted(wanted, key=lambda one: (kinds[one] == "video", one != kinds[one])):
        for key in KEYS.get(kinds[modality], ()):
            owners.setdefault(key, modality)
    return owners
