"""Messages between the front end and the process of a function, and the names by which the process finds it.

Values in messages are bytes, made by a ``PayloadCodec``: of a server ``ServedPayloads`` (``wire.py``).
"""

from __future__ import annotations

from importlib import import_module
from typing import Any, TypeAlias

import msgspec

from vllm_omni.flow.remote.messages import Fault

NOT_ENCODED = (TypeError, ValueError, OverflowError, RecursionError)
"""What a ``PayloadCodec`` raises for a value that cannot be sent."""


class RunMessage(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """About one run of the function."""

    run: int  # its number, from 1


# -- to the process ---------------------------------------------------------------------------------------------------


class StartRun(RunMessage, frozen=True):
    """Run the function; the fields are those of ``Activation``."""

    call_id: str
    node: str
    interface: str
    activation_id: int
    inputs: list[str]  # fields that it may read
    wanted: list[str]
    context: bytes
    session: str | None
    path: list[int]
    iteration: int


class Input(RunMessage, frozen=True):
    """Answers ``ReadInput`` with a chunk."""

    field: str
    payload: bytes
    seq: int
    last: bool


class InputEnd(RunMessage, frozen=True):
    """Answers ``ReadInput``: no chunk follows."""

    field: str
    error: Fault | None  # with which it broke off


class Taken(RunMessage, frozen=True):
    """One more yield may be sent."""


class CancelRun(RunMessage, frozen=True):
    """Cancel the run; ``RunEnded`` answers it."""


# -- to the front end -------------------------------------------------------------------------------------------------


class Ready(RunMessage, frozen=True):
    """The first message, about no run: the function is imported, or why it is not."""

    error: str | None


class ReadInput(RunMessage, frozen=True):
    """The function reads the next chunk of a field."""

    field: str


class Yielded(RunMessage, frozen=True):
    """One yield: field, payload and ``last`` of each emission."""

    emissions: list[tuple[str, bytes, bool]]


class RunEnded(RunMessage, frozen=True):
    """The run is over, its clean-up included."""

    error: str | None = None  # its own
    broken_input: str | None = None  # it ended with the error of this field instead


ToProcess: TypeAlias = StartRun | Input | InputEnd | Taken | CancelRun
ToFrontEnd: TypeAlias = Ready | ReadInput | Yielded | RunEnded

WINDOW = 8
"""Yields of a run that may be on their way, before the reader has taken the first of them."""

encode_message = msgspec.msgpack.Encoder().encode
decode_for_process = msgspec.msgpack.Decoder(ToProcess).decode
decode_for_front_end = msgspec.msgpack.Decoder(ToFrontEnd).decode


# -- names ------------------------------------------------------------------------------------------------------------


def name_of(function: Any) -> str:
    """The name by which another process finds a function: "module:qualified.name".

    Raises:
        TypeError: it is not in its module under its name.
    """
    module, qualname = getattr(function, "__module__", None), getattr(function, "__qualname__", None)
    if module is None or qualname is None:
        raise TypeError(f"{function!r} has no name in a module")
    name = f"{module}:{qualname}"
    try:
        is_found = find(name) is function
    except (ImportError, AttributeError):
        is_found = False
    if not is_found:
        raise TypeError(f"{name} is not in its module under this name")
    return name


def find(name: str) -> Any:
    """The function or class of a name.

    Raises:
        ImportError, AttributeError: there is no such module, or nothing of that name in it.
    """
    module, _, qualname = name.partition(":")
    found: Any = import_module(module)
    for part in qualname.split("."):
        found = getattr(found, part)
    return found
