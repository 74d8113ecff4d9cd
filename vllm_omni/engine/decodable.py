"""Checks that an engine core can read what it is sent: an error there would end the engine."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, TypedDict

import msgspec
from vllm.exceptions import VLLMClientError, VLLMValidationError
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreRequest

from vllm_omni.errors import InvalidRequest

_PLACE = re.compile(r" - at `\$\[(\d+)\].*`$")  # of a value in the array as which a request travels


class _FrameChunks(TypedDict):
    first: Annotated[int, msgspec.Meta(ge=1)]
    size: Annotated[int, msgspec.Meta(ge=1)]


class _StageArgs(TypedDict, total=False):
    """Of the arguments that have a meaning of their own (``STAGE_ARGS``), those that a scheduler or a runner reads."""

    publish: bool
    readers: Sequence[str]
    cached_rows: bool
    unopened: bool
    payloads: Sequence[bytes]
    row_names: bytes
    num_own_tokens: int
    frame_chunks: _FrameChunks
    picture: dict[str, Any]
    token_picture: dict[str, Any]
    inputs: dict[str, str]


_READ_STREAMS = ("num_own_tokens", "frame_chunks")


def check_stage_args(args: Mapping[str, Any]) -> None:
    """Check what a pipeline gives a stage: a scheduler that failed with it would end its engine.

    Raises:
        ValueError: a reserved argument is of a wrong type, or needs another one that is missing.
    """
    msgspec.convert(args, _StageArgs)
    if "payloads" not in args and (named := [name for name in _READ_STREAMS if args.get(name) is not None]):
        raise ValueError(f"{named[0]}: needs payloads, which are missing")


def check_params(stage: str, params: SamplingParams) -> None:
    """Check sampling parameters, whose class rejects what contradicts itself.

    Raises:
        InvalidRequest: a value is wrong, or of a wrong type, or contradicts another one.
    """
    try:
        msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams)
    except (ValueError, TypeError, VLLMClientError) as exc:  # msgspec's are values' errors
        raise InvalidRequest(f"sampling parameters of stage {stage!r}: {exc}") from exc


def check_request(request: EngineCoreRequest) -> None:
    """Check the types of a request's own fields, 1000 token ids in 6 µs; media and parameters have been checked.

    Raises:
        VLLMValidationError: a field is of a wrong type.
    """
    try:
        msgspec.convert(msgspec.structs.astuple(request), EngineCoreRequest)
    except msgspec.ValidationError as exc:
        said, place = str(exc), _PLACE.search(str(exc))
        if place is None:
            raise VLLMValidationError(said) from None
        name = EngineCoreRequest.__struct_fields__[int(place[1])]
        raise VLLMValidationError(f"{name}: {said[: place.start()]}") from None
