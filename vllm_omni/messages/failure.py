"""``Failure``: why a request ended without an answer."""

from __future__ import annotations

import logging
from typing import Any, NamedTuple

from vllm_omni.errors import InvalidRequest, RelayBroken

logger = logging.getLogger(__name__)


class Failure(NamedTuple):
    message: str
    is_invalid: bool = False  # the request is at fault, not the stage
    param: str | None = None  # the parameter at fault, if it is a single one
    is_lost: bool = False  # the stage could not read what another one had published

    @property
    def report(self) -> dict[str, Any]:
        """What the request's last output says, read by ``raise_reported``."""
        param = {} if self.param is None else {"param": self.param}
        lost = {"lost": True} if self.is_lost else {}
        return {"error": self.message, "invalid": self.is_invalid, **lost, **param}


def make_failure(request_id: str, exc: Exception, invalid: type[Exception] = InvalidRequest) -> Failure:
    """Describe an error that ends a request; log it unless the request caused it.

    Args:
        invalid: the class of errors that the request has caused.
    """
    is_invalid = isinstance(exc, invalid)
    if not is_invalid:
        logger.error("request %s failed", request_id, exc_info=exc)
    if isinstance(exc, InvalidRequest):
        return Failure(str(exc), is_invalid, exc.param)
    return Failure(f"{type(exc).__name__}: {exc}", is_invalid, is_lost=isinstance(exc, RelayBroken))
