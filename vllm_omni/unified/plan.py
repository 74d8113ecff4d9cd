"""``ImagePlan``: what a request's picture is computed from, decided at its admission."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, get_args

import msgspec
import numpy as np

from vllm_omni.errors import InvalidRequest
from vllm_omni.names import suggest
from vllm_omni.unified.preface import Preface, masked

Renorm = Literal["global", "channel", "text_channel"]

WITHOUT_TEXT, WITHOUT_IMAGES = "text", "image"
"""The branches of a picture's guidance, named by what they are without."""


MAX_STEPS = 1000
MIN_SHIFT, MAX_SHIFT = 0.01, 100.0  # beyond them, times are not distinct in float32


class Guidance(msgspec.Struct, frozen=True):
    """How far a picture follows its context.

    Raises:
        InvalidRequest: a value is out of its range; named as in ``ImageParams``.
    """

    text_scale: float = 4.0  # away from what the last text is not read for; 1: no guidance
    image_scale: float = 1.5  # away from what no image is read for; 1: none of this kind
    interval: tuple[float, float] = (0.4, 1.0)  # steps at a time low < t <= high are guided
    renorm: Renorm = "global"  # where the guided velocity is no longer than the unguided one
    renorm_min: float = 0.0  # how far it may be shortened for that

    def __post_init__(self) -> None:
        for name, value in (("guidance_scale", self.text_scale), ("image_guidance_scale", self.image_scale)):
            if not (math.isfinite(value) and value >= 0):
                _reject(name, value, "a number of 0 or more; 1: no guidance")
        low, high = self.interval
        if not 0 <= low <= high <= 1:
            _reject("guidance_interval", list(self.interval), "[low, high] with 0 <= low <= high <= 1")
        if self.renorm not in get_args(Renorm):
            said = suggest(self.renorm, get_args(Renorm))
            raise InvalidRequest(f"guidance_renorm = {self.renorm!r}: {said}", param="guidance_renorm")
        if not 0 <= self.renorm_min <= 1:
            _reject("guidance_renorm_min", self.renorm_min, "a number from 0 to 1")

    def is_on(self, time: float) -> bool:
        """Whether a step at this time, a float32, is guided."""
        low, high = (float(np.float32(one)) for one in self.interval)  # else a step at a bound may be on its other side
        return self.text_scale > 1 and low < time <= high


class ImagePlan(msgspec.Struct, frozen=True):
    """One picture.

    Attributes:
        grid: rows and columns of its tokens.
        num_steps: passes of the language model over the whole canvas.
        shift: how long the steps stay near noise, see ``flow.timesteps``.
        seed: of the noise; None: another for each request.
        progress: whether the end of each step is reported.
        preview_every: every so many steps the report has a preview; 0: never.
        negative: the tokens that stand in the place of the last text where that is not read.
        without_text, without_images: what the guidance's branches read of the request's prompt, as ``spans.Ranges``.
        end_of_text: the token that ends the text which the request writes first, and which the picture reads; None: it
            writes none.
        num_markers: the tokens of a canvas beside its latents.
        mask, masked: the token that stands in the place of these of the sequence where the last text is not read; None:
            that branch has no such tokens.
        preface: what the request writes in front of the picture, for families whose texts need more than
            ``end_of_text``.
    """

    grid: tuple[int, int]
    num_steps: int = 49
    shift: float = 3.0
    seed: int | None = None
    guidance: Guidance = Guidance()
    progress: bool = False
    preview_every: int = 0
    negative: tuple[int, ...] = ()
    without_text: tuple[tuple[int, int], ...] = ()
    without_images: tuple[tuple[int, int], ...] = ()
    end_of_text: int | None = None
    num_markers: int = 2
    mask: int | None = None
    masked: tuple[tuple[int, int], ...] = ()
    preface: Preface | None = None

    def __post_init__(self) -> None:
        if min(self.grid) < 1:
            _reject("size", list(self.grid), "at least one token in each direction")
        if not 1 <= self.num_steps <= MAX_STEPS:
            _reject("num_inference_steps", self.num_steps, f"from 1 to {MAX_STEPS}")
        if not MIN_SHIFT <= self.shift <= MAX_SHIFT:
            _reject("shift", self.shift, f"a number from {MIN_SHIFT} to {MAX_SHIFT}")
        if self.seed is not None and not -(2**63) <= self.seed < 2**64:
            _reject("seed", self.seed, "from -2**63 to 2**64 - 1")

    @property
    def num_latents(self) -> int:
        rows, columns = self.grid
        return rows * columns

    @property
    def num_canvas_tokens(self) -> int:
        """The tokens of a pass: the latents and their markers."""
        return self.num_latents + self.num_markers

    def branches(self, time: float, num_prompt_tokens: int) -> tuple[str, ...]:
        """The further contexts that a step at this time is computed with."""
        if not self.guidance.is_on(time):
            return ()
        if self.guidance.image_scale <= 1 or self.reads_no_images(num_prompt_tokens):
            return (WITHOUT_TEXT,)
        return (WITHOUT_TEXT, WITHOUT_IMAGES)

    def reads_no_images(self, num_prompt_tokens: int) -> bool:
        """Whether the context is that of the branch without images, whose velocity is then the picture's own."""
        return self.end_of_text is None and self.without_images == ((0, num_prompt_tokens),)

    def is_reported(self, num_done: int) -> bool:
        """Whether the end of a step, which is not the last, is reported."""
        return self.progress or self.has_preview(num_done)

    def has_preview(self, num_done: int) -> bool:
        """Whether the report of a step has a preview."""
        return self.preview_every > 0 and num_done % self.preview_every == 0

    def ranges(self, name: str) -> tuple[tuple[int, int], ...]:
        """The tokens of the prompt that a branch reads."""
        return {WITHOUT_TEXT: self.without_text, WITHOUT_IMAGES: self.without_images}[name]

    def ids_without_text(self, ids: Sequence[int]) -> list[int] | None:
        """The sequence of the branch without the last text, where it is the request's own with masked tokens."""
        return None if self.mask is None else masked(ids, self.masked, self.mask)

    def added(self, name: str) -> tuple[int, ...]:
        """The tokens that a branch reads behind those."""
        return self.negative if name == WITHOUT_TEXT else ()

    def check_fits(self, num_prompt_tokens: int, max_batched_tokens: int, max_model_len: int) -> None:
        """Raises:
        InvalidRequest: no step or no sequence of the engine has room for the picture.
        """
        needed = self.num_canvas_tokens
        if needed > max_batched_tokens:
            said = f"its {needed} tokens are computed in one step, which has at most {max_batched_tokens}"
            raise InvalidRequest(f"size: the picture is too large: {said} (max_num_batched_tokens)", param="size")
        negative = sum(end - start for start, end in self.without_text) + len(self.negative)
        own = num_prompt_tokens + (self.end_of_text is not None)  # a text that the request writes has a token or more
        longest = max(own, negative)
        if longest + needed + 1 > max_model_len:
            left = max(max_model_len - longest - 3, 0)
            said = f"its {self.num_latents} tokens do not fit behind the prompt's {longest}: {left} do"
            raise InvalidRequest(
                f"size: the picture is too large: {said} (max_model_len {max_model_len})", param="size"
            )


def _reject(name: str, value: object, valid: str) -> None:
    raise InvalidRequest(f"{name} = {value!r}: must be {valid}", param=name)
