"""What an engine core could not decode is rejected before it is sent."""

from typing import Any

import pytest
import torch
from vllm.exceptions import VLLMValidationError
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from tests.cases import case
from vllm_omni.engine.decodable import check_request

MEDIA = MultiModalFeatureSpec(None, "image", "picture", PlaceholderRange(0, 2), "hash")
FIELDS: dict[str, Any] = {
    "request_id": "request",
    "prompt_token_ids": [1, 2],
    "mm_features": [MEDIA],
    "sampling_params": SamplingParams(),
    "pooling_params": None,
    "arrival_time": 1.5,
    "lora_request": None,
    "cache_salt": "salt",
    "data_parallel_rank": None,
}
WRONG: list[tuple[str, Any]] = [
    ("cache_salt", 5),
    ("priority", 1.5),
    ("prompt_token_ids", [1, True]),
    ("prompt_embeds", [[0.5]]),
    ("trace_headers", {"traceparent": 5}),
    ("data_parallel_rank", "0"),
]


def decoded(request: EngineCoreRequest) -> EngineCoreRequest:
    """As an engine core decodes it."""
    return MsgpackDecoder(EngineCoreRequest).decode([bytearray(one) for one in MsgpackEncoder().encode(request)])


def test_what_an_engine_core_decodes_passes() -> None:
    for more in ({}, {"prompt_token_ids": None, "prompt_embeds": torch.zeros(2, 3)}, {"priority": -1}):
        request = EngineCoreRequest(**{**FIELDS, **more})
        check_request(request)
        assert decoded(request).priority == request.priority


def test_a_field_that_it_cannot_decode_is_named() -> None:
    for name, value in WRONG:
        with case(name):
            request = EngineCoreRequest(**{**FIELDS, name: value})
            with pytest.raises(VLLMValidationError, match=f"^{name}: Expected `"):
                check_request(request)
            with pytest.raises(Exception, match="xpected"):
                decoded(request)
