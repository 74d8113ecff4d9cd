"""``DiffusionConfig``: the ``diffusion:`` section of a stage, read by its scheduler and its runner."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import Field

from vllm_omni.config.checks import Count, NumBytes, Seconds
from vllm_omni.config.diffusion_params import DiffusionLimits

DIFFUSION = "diffusion"
"""Key of vLLM's ``additional_config`` under which the section reaches the processes of a stage, as plain types."""


@dataclass(frozen=True, kw_only=True)
class DiffusionConfig:
    """Settings of batches, request limits and the cache of a diffusion stage.

    One engine step is one call of the denoiser for a batch of requests of one shape. The engine argument
    ``max_num_seqs`` limits how many requests run at a time.
    """

    max_rows: Count | None = None  # of a batch: one per output, two with guidance in one call; None: max_num_seqs
    max_batch_bytes: Count | None = None  # of a batch's denoiser inputs; None: no limit
    max_wait_batches: Count = 4  # batches of other shapes that a shape waits for; with more shapes, one of each
    # These limit one request. None: no limit of steps and outputs; of the others, four times the pipeline's default.
    max_pixels: Count | None = None
    max_frames: Count | None = None
    max_seconds: Seconds | None = None
    max_steps: Count | None = None
    max_outputs: Count | None = None
    max_prompt_tokens: Count | None = None
    attention_backend: str | None = None  # by diffusers' name; None: diffusers' default
    vae_tiling: bool = False  # the VAE decodes (and encodes) a large picture in overlapping tiles
    vae_slicing: bool = False  # the VAE decodes the outputs of a batch one by one
    merge: bool = True  # requests share a call of the denoiser
    cache_threshold: Annotated[float, Field(ge=0)] = 0.0  # of the first-block cache; 0: off
    cache_bytes: NumBytes = 1 << 30  # of all its entries
    cache_ttl_s: Annotated[float, Field(gt=0)] = 600.0  # after which an unused entry is dropped

    @classmethod
    def of(cls, additional_config: Mapping[str, Any]) -> DiffusionConfig:
        """Read the section in a process of a stage; without one, the defaults."""
        return cls(**additional_config.get(DIFFUSION, {}))

    @property
    def limits(self) -> DiffusionLimits:
        return DiffusionLimits(**{name: getattr(self, name) for name in DiffusionLimits.__struct_fields__})
