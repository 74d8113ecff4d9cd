"""``TokenPlan``: what a picture that is written as tokens is computed from, and the arithmetic of its guidance.

    l' = l_0 + s (l - l_0)        ``guided``, s: ``TokenPlan.scale``

l are the logits with the whole prompt, l_0 those with the unconditional one.

From: Janus (arXiv:2410.13848) and Janus-Pro (arXiv:2501.17811).
"""

from __future__ import annotations

import math

import msgspec
from torch import Tensor

from vllm_omni.errors import InvalidRequest


class TokenPlan(msgspec.Struct, frozen=True):
    """One picture.

    Attributes:
        num_tokens: of the picture; its request ends with the last one.
        scale: how far the picture follows its prompt; 1: no guidance.
        unconditional: the prompt of the partner whose logits the guidance reads.
        seed: of the sampling; None: as the sampling parameters say.
    """

    num_tokens: int
    scale: float
    unconditional: tuple[int, ...] = ()
    seed: int | None = None

    def __post_init__(self) -> None:
        if not (math.isfinite(self.scale) and self.scale >= 0):
            said = "must be a number of 0 or more; 1: no guidance"
            raise InvalidRequest(f"guidance_scale = {self.scale}: {said}", param="guidance_scale")

    @property
    def is_guided(self) -> bool:
        return self.scale != 1

    def check_fits(
        self, num_prompt_tokens: int, max_model_len: int, max_num_seqs: int, num_blocks: int, block_size: int
    ) -> None:
        """Check that an engine has room for the picture and its partner.

        Args:
            num_blocks: of the engine's KV cache that requests can have, of ``block_size`` tokens.

        Raises:
            InvalidRequest: it has not.
        """
        longest = max(num_prompt_tokens, len(self.unconditional))
        if longest + self.num_tokens > max_model_len:
            left = max(max_model_len - self.num_tokens, 0)
            said = f"its {longest} tokens and the picture's {self.num_tokens} are more than max_model_len"
            raise InvalidRequest(f"the prompt is too long: {said} = {max_model_len}; it may have {left}")
        if not self.is_guided:
            return
        if max_num_seqs < 2:
            said = "a guided picture is two sequences that are computed together, and max_num_seqs is 1"
            raise InvalidRequest(f"guidance_scale = {self.scale}: {said}; give 1", param="guidance_scale")
        if 2 * math.ceil((longest + self.num_tokens) / block_size) > num_blocks:
            said = f"a guided picture is two sequences of {longest + self.num_tokens} tokens"
            raise InvalidRequest(f"{said}, and the engine's KV cache has room for {num_blocks * block_size} tokens")


def guided(logits: Tensor, unconditional: Tensor, scale: Tensor | float) -> Tensor:
    """The guided logits of one or more tokens, [..., number of ids]."""
    return unconditional + scale * (logits - unconditional)
