"""The arithmetic of a picture: rectified flow with two kinds of guidance.

    t_i = s u_i / (1 + (s - 1) u_i),  u_i from 1 to 0          (1)  ``timesteps``
    g   = v_text + a (v - v_text)                              (2)  ``combine``, a: ``Guidance.text_scale``
    g'  = v_image + b (g - v_image)                            (3)  b: ``Guidance.image_scale``
    g'' = g' clamp(|v| / |g'|, r, 1)                           (4)  r: ``Guidance.renorm_min``
    x_{i+1} = x_i - (t_i - t_{i+1}) g''                        (5)  ``advance``

v is the velocity with the whole context, v_text that without the last text, v_image that without images. With
``renorm = "text_channel"`` (4) comes between (2) and (3).

From: BAGEL (arXiv:2505.14683); the details, from its published code, are in ``docs/unified.md``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vllm_omni.unified.plan import Guidance


def timesteps(num_steps: int, shift: float) -> Tensor:
    """The times of steps and their end, from 1 to 0: [num_steps + 1] float32, eq. (1)."""
    even = torch.linspace(1, 0, num_steps + 1)
    return shift * even / (1 + (shift - 1) * even)


def combine(velocity: Tensor, without_text: Tensor, without_images: Tensor | None, guidance: Guidance) -> Tensor:
    """The guided velocity of one picture, [N, channels], eq. (2) to (4).

    Args:
        without_images: None: without this guidance.
    """
    guided = without_text + guidance.text_scale * (velocity - without_text)
    if guidance.renorm == "text_channel":
        guided = _shortened(guided, velocity, guidance)
    if without_images is not None:
        guided = without_images + guidance.image_scale * (guided - without_images)
    return guided if guidance.renorm == "text_channel" else _shortened(guided, velocity, guidance)


def _shortened(guided: Tensor, velocity: Tensor, guidance: Guidance) -> Tensor:
    """No longer than the unguided velocity, as a whole or in each token; eq. (4)."""
    dims = (0, 1) if guidance.renorm == "global" else (1,)
    length, limit = (torch.linalg.vector_norm(one, dim=dims, keepdim=True) for one in (guided, velocity))
    return guided * (limit / (length + 1e-8)).clamp(guidance.renorm_min, 1.0)


def advance(latents: Tensor, velocity: Tensor, now: Tensor, after: Tensor) -> Tensor:
    """The latents after a step, [N, channels], eq. (5)."""
    return latents - velocity * (now - after)


def start_noise(num_tokens: int, num_channels: int, seed: int | None) -> Tensor:
    """The latents before the first step: [num_tokens, num_channels] float32, host, whatever the model's device."""
    generator = torch.Generator()
    if seed is None:
        generator.seed()
    else:
        generator.manual_seed(seed)
    return torch.randn(num_tokens, num_channels, generator=generator)
