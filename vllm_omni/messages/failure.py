"""``Failure``: why a request ended without an answer."""

from __future__ import annotations

import logging
from typing import NamedTuple

from vllm_omni.errors import InvalidRequest

logger = logging.getLogger(__name__)


class Failure(NamedTuple):
    message: str
    is_invalid: bool = False  # the request is at fault, not the stage


def make_failure(request_id: str, exc: Exception, invalid: type[Exception] = InvalidRequest) -> Failure:
    """Describe an error that ends a request; log it unless the request caused it.

    Args:
        invalid: the class of errors that the request has caused.
    """
    is_invalid = isinstance(exc, invalid)
    if not is_invalid:
        logger.error("request %s failed", request_id, exc_info=exc)
    return Failure(str(exc) if isinstance(exc, InvalidRequest) else f"{type(exc).__name__}: {exc}", is_invalid)
