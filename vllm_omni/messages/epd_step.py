"""What a scheduler that encodes images beside the language model says to its runner, and what the runner says back.

From: HydraInfer, section 4.2 (stage-level batching): encodes and the language model's batch of one iteration.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from vllm.config import VllmConfig
from vllm.multimodal.inputs import MultiModalFeatureSpec
from vllm.platforms import current_platform
from vllm.v1.outputs import ModelRunnerOutput

from vllm_omni.errors import ConfigError
from vllm_omni.messages.stage_step import StreamSchedulerOutput

EPD_CONFIG = "epd"
"""Key of a stage's ``additional_config`` under which its budgets travel (``EPDConfig``)."""

ENCODE_IN, SLICES, THREAD = "encode_in", "slices", "thread"
"""Key of an ``epd`` section, and where images are encoded: between the steps, or in a thread beside them."""


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
    # Images that this step's forward is the last to read. Their room is the batch's that begins with this step.
    free_behind_forward: list[str] = field(default_factory=list)
    # How many layers of the tower the batch under way is planned to go on by in this step; None: to its end.
    num_encode_layers: int | None = None
    # What is left of the iteration for the runner's step, its language forward first; None: it counts layers. A runner
    # that can keep to it looks at its clock instead of the plan, which knows neither how long this forward was nor who
    # else has the machine. Who cannot: ranks, which must stop at the same layer, and devices that work behind the host.
    max_seconds: float | None = None


@dataclass
class EncodeReport:
    """What a step did of the batch under way."""

    encoded: list[str]  # identifiers, now in the encoder cache; empty unless the batch has ended
    num_layers: float  # gone by in this step; 0 of a batch that was encoded beside the steps
    num_layers_of_batch: int  # between the batch's begin and its end
    seconds: float  # that this step spent on it
    failed: dict[str, str] = field(default_factory=dict)  # identifiers of a batch that the encoder failed on -> why


@dataclass
class EPDModelRunnerOutput(ModelRunnerOutput):
    encode_report: EncodeReport | None = None
    # When the step's encodes in front of its forward began and ended, by ``time.time``; None: it had none.
    encode_times: tuple[float, float] | None = None


def encodes_in_thread(config: VllmConfig) -> bool:
    """Whether an engine's images are encoded beside its steps; not if it has no images, or no language model beside.

    Raises:
        ConfigError: it would be, and cannot.
    """
    if config.additional_config.get(EPD_CONFIG, {}).get(ENCODE_IN) != THREAD:
        return False
    if config.is_mm_encoder_only or not config.model_config.supports_multimodal_inputs:
        return False
    if config.parallel_config.world_size > 1 or not current_platform.is_cpu():
        raise ConfigError(
            f"epd.{ENCODE_IN} = {THREAD!r}: only on a CPU and with one rank, of which each would end at another time; "
            f"give {SLICES!r}"
        )
    return True
