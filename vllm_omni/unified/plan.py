"""``ImagePlan``: what a request's picture is computed from, decided at its admission."""

from __future__ import annotations

import math
from typing import Literal, get_args

import msgspec

from vllm_omni.errors import InvalidRequest
from vllm_omni.names import suggest

Renorm = Literal["global", "channel", "text_channel"]

WITHOUT_TEXT, WITHOUT_IMAGES = "text", "image"
"""The branches of a picture's guidance, named by what they are without."""


class Guidance(msgspec.Struct, frozen=True):
    """How far a picture follows its context.

    Raises:
        InvalidRequest: a value is out of its range.
    """

    text_scale: float = 4.0  # away from what the last text is not read for; 1: no guidance
    image_scale: float = 1.5  # away from what no image is read for; 1: none of this kind
    interval: tuple[float, float] = (0.4, 1.0)  # steps at a time low < t <= high are guided
    renorm: Renorm = "global"  # where the guided velocity is no longer than the unguided one
    renorm_min: float = 0.0  # how far it may be shortened for that

    def __post_init__(self) -> None:
        for name in ("text_scale", "image_scale"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                _reject(name, value, "a number of 0 or more; 1: no guidance")
        low, high = self.interval
        if not 0 <= low <= high <= 1:
            _reject("interval", list(self.interval), "[low, high] with 0 <= low <= high <= 1")
        if self.renorm not in get_args(Renorm):
            raise InvalidRequest(f"renorm = {self.renorm!r}: {suggest(self.renorm, get_args(Renorm))}", param="renorm")
        if not 0 <= self.renorm_min <= 1:
            _reject("renorm_min", self.renorm_min, "a number from 0 to 1")

    def is_on(self, time: float) -> bool:
        """Whether a step at this time is guided."""
        low, high = self.interval
        return self.text_scale > 1 and low < time <= high


class ImagePlan(msgspec.Struct, frozen=True):
    """One picture.

    Attributes:
        grid: rows and columns of its tokens.
        num_steps: passes of the language model over the whole canvas.
        shift: how long the steps stay near noise, see ``flow.timesteps``.
        seed: of the noise; None: another for each request.
        without_text, without_images: what the guidance's branches read of the request's prompt, as ``spans.Ranges``.
        end_of_text: the token that ends the text which the request writes first, and which the picture reads; None: it
            writes none.
    """

    grid: tuple[int, int]
    num_steps: int = 49
    shift: float = 3.0
    seed: int | None = None
    guidance: Guidance = Guidance()
    without_text: tuple[tuple[int, int], ...] = ()
    without_images: tuple[tuple[int, int], ...] = ()
    end_of_text: int | None = None

    def __post_init__(self) -> None:
        if min(self.grid) < 1:
            _reject("size", list(self.grid), "at least one token in each direction")
        if self.num_steps < 1:
            _reject("steps", self.num_steps, "1 or more")
        if not (math.isfinite(self.shift) and self.shift > 0):
            _reject("shift", self.shift, "a number above 0")

    @property
    def num_latents(self) -> int:
        rows, columns = self.grid
        return rows * columns

    @property
    def num_canvas_tokens(self) -> int:
        """The tokens of a pass: the latents between the markers of an image."""
        return self.num_latents + 2

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

    def check_fits(self, num_prompt_tokens: int, max_batched_tokens: int, max_model_len: int) -> None:
        """Raises:
        InvalidRequest: no step or no sequence of the engine has room for the picture.
        """
        needed = self.num_canvas_tokens
        if needed > max_batched_tokens:
            said = f"its {needed} tokens are computed in one step, which has at most {max_batched_tokens}"
            raise InvalidRequest(f"size: the picture is too large: {said} (max_num_batched_tokens)", param="size")
        if num_prompt_tokens + needed + 1 > max_model_len:
            left = max(max_model_len - num_prompt_tokens - 3, 0)
            said = f"its {self.num_latents} tokens do not fit behind the prompt's {num_prompt_tokens}: {left} do"
            raise InvalidRequest(
                f"size: the picture is too large: {said} (max_model_len {max_model_len})", param="size"
            )


def _reject(name: str, value: object, valid: str) -> None:
    raise InvalidRequest(f"{name} = {value!r}: must be {valid}", param=name)
