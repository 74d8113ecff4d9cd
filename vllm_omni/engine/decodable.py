"""Checks that an engine core can decode what it is sent: there, an error would end its input thread."""

from __future__ import annotations

import re

import msgspec
from vllm.exceptions import VLLMClientError, VLLMValidationError
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreRequest

from vllm_omni.errors import InvalidRequest

_PLACE = re.compile(r" - at `\$\[(\d+)\].*`$")  # of a value in the array as which a request travels


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
