"""What a scheduler that encodes images beside the language model says to its runner, and what the runner says back.

From: HydraInfer, section 4.2 (stage-level batching): encodes and the language model's batch of one iteration.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from vllm.multimodal.inputs import MultiModalFeatureSpec
from vllm.v1.outputs import ModelRunnerOutput

from vllm_omni.model_executor.stage_model import StreamSchedulerOutput


class EncodeItem(NamedTuple):
    """One image to encode. Its request may still wait, so that the runner does not know it yet."""

    request_id: str
    feature: MultiModalFeatureSpec  # its ``identifier`` is the key in the runner's encoder cache

    @property
    def num_embeds(self) -> int:
        return self.feature.mm_position.get_num_embeds()


class EncodeBatch(NamedTuple):
    """Images that go through the tower together; has what vLLM's ``_execute_mm_encoder`` reads of a step."""

    items: list[EncodeItem]
    ec_manager_metadata: Any
    scheduled_encoder_inputs: dict[str, list[int]] = {}  # none: their encode is not timed as part of a request
    free_encoder_mm_hashes: list[str] = []

    def inputs(self) -> tuple[list[str], list[tuple[str, Any]], list[tuple[str, Any]]]:
        """Identifiers, (modality, processed data) and (request id, position), those of a modality together."""
        items = sorted(self.items, key=lambda item: item.feature.modality)
        return (
            [item.feature.identifier for item in items],
            [(item.feature.modality, item.feature.data) for item in items],
            [(item.request_id, item.feature.mm_position) for item in items],
        )


@dataclass
class EPDSchedulerOutput(StreamSchedulerOutput):
    """vLLM's, with the encodes of the step. No language forward waits for them.

    ``free_encoder_mm_hashes`` never names an image that is still being encoded.
    """

    # A batch that begins with this step; empty while another is under way.
    encodes: list[EncodeItem] = field(default_factory=list)
    # How many layers of the tower the batch under way may go on by in this step; None: to its end. Layers rather than
    # seconds, because all ranks of a tensor-parallel stage must stop at the same one.
    num_encode_layers: int | None = None


@dataclass
class EncodeReport:
    """What a step did of the batch under way."""

    encoded: list[str]  # identifiers, now in the encoder cache; empty unless the batch has ended
    num_layers: int  # gone by in this step
    num_layers_of_batch: int  # between the batch's begin and its end
    seconds: float  # that this step spent on it


@dataclass
class EPDModelRunnerOutput(ModelRunnerOutput):
    encode_report: EncodeReport | None = None
    # When the step's encodes in front of its forward began and ended, by ``time.time``; None: it had none.
    encode_times: tuple[float, float] | None = None
