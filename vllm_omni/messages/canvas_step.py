"""A step of the canvases: what a runner computes of a request that asks for a picture.

From: Omni-Flow, section 5.3.
"""

from __future__ import annotations

from typing import NamedTuple

PICTURE = "picture"
"""Stage argument (``STAGE_ARGS``) of a request that asks for a picture: an ``ImagePlan``."""

LATENTS, GRID = "latents", "grid"
"""Keys of what a complete picture is published as: [N, channels of a token], float32; rows and columns of tokens."""

STEP, NUM_STEPS = "step", "num_steps"
"""Keys of the report of a denoise step; with latents, these are of a preview."""

OWN = "own"
"""Name of the branch that is the request itself."""


DENOISES = "denoises"
"""Set in the configuration of a model that denoises pictures (``stage_model.Denoises``)."""


class Tail(NamedTuple):
    """Tokens that the scheduler has put at the end of a sequence, in place of what was sampled."""

    start: int  # of the sequence
    ids: tuple[int, ...]
    grid: tuple[int, int] | None = None  # rows and columns of the request's picture, if they are chosen by them


class CanvasStep(NamedTuple):
    """One branch in a step; no token is sampled of it."""

    request_id: str  # of the picture
    branch: str
    together_with: tuple[str, ...]  # the branches that the denoise step is computed with; empty: the context alone
    step: int  # denoise steps that are done
    num_context: int  # tokens in front of the canvas
