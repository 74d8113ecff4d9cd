"""``Failure``: why a request ended without an answer."""

from __future__ import annotations

import logging
from typing import NamedTuple

from vllm_omni.errors import InvalidRequest

logger = logging.getLogger(__name__)


class Failure(NamedTuple):
    message: str
    is_invalid: bool = False  # the request is at fault, not the stage


def make_failure(request_id: str, exc: Exception, *, is_invalid: bool | None = None) -> Failure:
    """Describe an error that ends a request; log it unless the request caused it.

    Args:
        is_invalid: whether the request caused it; None: if it is a ``ValueError``.
    """
    is_invalid = isinstance(exc, ValueError) if is_invalid is None else is_invalid
    if not is_invalid:
        logger.error("request %s failed", request_id, exc_info=exc)
    return Failure(str(exc) if isinstance(exc, InvalidRequest) else f"{type(exc).__name__}: {exc}", is_invalid)
