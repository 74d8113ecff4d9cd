"""``Answer``: the outputs that the user receives, made from the frames of a call."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace

import torch
from vllm.outputs import RequestOutput

from vllm_omni.engine.latency_metrics import RequestLatency
from vllm_omni.flow import OutputFrame
from vllm_omni.messages.outputs import OmniRequestOutput
from vllm_omni.model_executor.pipeline import Pipeline, RequestContext


class Answer:
    """One request's outputs, and whether all of them have ended.

    Args:
        outputs: the graph output that answers each modality.
    """

    def __init__(
        self, pipeline: Pipeline, context: RequestContext, outputs: Mapping[str, str], latency: RequestLatency
    ) -> None:
        self._pipeline = pipeline
        self._context = context
        self._latency = latency
        self._modality_of = {output: modality for modality, output in outputs.items()}
        self._unfinished = set(outputs)
        self._started = time.monotonic()

    def output_of(self, frame: OutputFrame) -> OmniRequestOutput:
        """Make the user's output of a frame; the last one carries the times of the request."""
        modality = self._modality_of[frame.field]
        if frame.last:
            self._unfinished.discard(modality)
        payload: OmniRequestOutput | None = frame.payload
        if modality == "text" and payload is not None:
            # Copied: the next stage reads the same object, and the user's copy is merged into.
            output = OmniRequestOutput.of(payload)
            output.request_id = self._context.request_id
            output.outputs = [replace(one, token_ids=list(one.token_ids)) for one in payload.outputs]
        else:
            empty = RequestOutput(self._context.request_id, None, [], None, outputs=[], finished=False)
            output = OmniRequestOutput.of(empty)
            if modality != "text":
                output.multimodal_output = self._values(modality, payload)
        output.finished = not self._unfinished
        output.stage_durations = dict(self._context.stage_durations)
        if output.finished:
            output.stage_durations["total"] = time.monotonic() - self._started
            output.latency_parts, output.slo_reports = self._latency.end()
        return output

    def _values(self, modality: str, payload: OmniRequestOutput | None) -> dict[str, object]:
        """The values of another modality; for a branch that produced none, an empty one."""
        rate = self._pipeline.sample_rate
        sample_rate = {"sample_rate": rate} if rate and modality == "audio" else {}
        if payload is not None and modality in self._pipeline.modalities:
            return {**payload.multimodal_output, **sample_rate}
        if modality == "audio":
            return {"audio": torch.zeros(0), **sample_rate}
        return {modality: [] if payload is None else self._pipeline.extra_output(modality, payload)}
