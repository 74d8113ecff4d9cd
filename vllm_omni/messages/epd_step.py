"""A step of an engine that encodes images beside its language model: vLLM's structs, with the encodes.

From: HydraInfer, section 4.2 (stage-level batching): the encodes and the language batch of one iteration.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from vllm.v1.outputs import ModelRunnerOutput

from vllm_omni.messages.images import EncodeItem, EncodeReport
from vllm_omni.messages.media_counts import MediaCounts
from vllm_omni.messages.stage_step import StreamSchedulerOutput


class EncodeBatch(NamedTuple):
    """Images that pass through the encoder together; has what vLLM's ``_execute_mm_encoder`` reads from a step."""

    items: list[EncodeItem]
    ec_manager_metadata: Any
    scheduled_encoder_inputs: dict[str, list[int]] = {}  # empty: the encode is not timed as part of a request
    free_encoder_mm_hashes: list[str] = []

    def inputs(self) -> tuple[list[str], list[tuple[str, Any]], list[tuple[str, Any]]]:
        """Identifiers, (modality, processed data) and (request id, position), grouped by modality."""
        items = sorted(self.items, key=lambda item: item.feature.modality)
        return (
            [item.feature.identifier for item in items],
            [(item.feature.modality, item.feature.data) for item in items],
            [(item.request_id, item.feature.mm_position) for item in items],
        )


@dataclass
class EPDSchedulerOutput(StreamSchedulerOutput):
    """vLLM's, with the encodes of the step, for which no language forward waits.

    ``free_encoder_mm_hashes`` never names an image that is still being encoded.
    """

    # A batch that starts with this step; empty while another is in flight.
    encodes: list[EncodeItem] = field(default_factory=list)
    # Images that this step's forward is the last to read; their room is for the batch that starts with this step.
    free_behind_forward: list[str] = field(default_factory=list)
    # Layers of the encoder that the batch in flight is planned to advance by in this step; None: to its end.
    num_encode_layers: int | None = None
    # Time left of the iteration for the runner's step, its language forward included; None: the runner counts layers. A
    # runner that can stop by the clock ignores the plan, which does not know how long this forward took or what else
    # uses the machine. Ranks cannot, as they must stop at the same layer, nor can devices that lag behind the host.
    max_seconds: float | None = None


@dataclass
class EPDModelRunnerOutput(ModelRunnerOutput):
    """vLLM's, with the images of the step."""

    encode_report: EncodeReport | None = None
    # Start and end (``time.time``) of the encodes in front of the step's forward; None: there were none.
    encode_times: tuple[float, float] | None = None
    # What the pool of encoded media has done since the last step that says so.
    media_counts: MediaCounts | None = None
