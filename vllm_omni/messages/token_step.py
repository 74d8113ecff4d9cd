"""A step of pictures that are written as tokens: which of them get a token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

TOKEN_PICTURE = "token_picture"
"""Stage argument (``STAGE_ARGS``) of a request whose reply is a picture: a ``TokenPlan``."""


class TokenStep(NamedTuple):
    """The requests of a step that compute their last token, and write pictures."""

    sampled: Mapping[str, str | None] = {}  # request -> its partner, which gets the same token; None: it has none
    # Requests without their partner, or the reverse: no token is sampled, and the step's last one is computed again.
    alone: Sequence[str] = ()
