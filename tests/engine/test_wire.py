"""What crosses an edge comes back from its bytes as it was."""

from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from vllm.inputs import tokens_input
from vllm.logprobs import FlatLogprobs, Logprob
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalBatchedField as Batched
from vllm.multimodal.inputs import MultiModalFieldElem, MultiModalKwargsItem, MultiModalKwargsItems, PlaceholderRange
from vllm.outputs import CompletionOutput
from vllm.sampling_params import RequestOutputKind, SamplingParams, StructuredOutputsParams
from vllm.v1.metrics.stats import RequestStateStats

from vllm_omni.config.diffusion_params import DiffusionParams
from vllm_omni.engine.wire import ServedPayloads
from vllm_omni.errors import InvalidRequest, LinkError, OmniError, PoolExhausted, StageFailed, StageUnavailable
from vllm_omni.flow import ENTRY, EndReason, Frame
from vllm_omni.flow.remote.messages import MessageCodec, OpenCall
from vllm_omni.messages.outputs import OmniRequestOutput
from vllm_omni.messages.payload import Payload, TensorRef
from vllm_omni.messages.report import NodeReport
from vllm_omni.messages.request import PromptCache, RequestContext, StageRequest
from vllm_omni.messages.stage_output import StageOutput
from vllm_omni.messages.timeline import Mark, Task, TaskTimes, Timeline
from vllm_omni.messages.token_names import Part, TokenNames

PAYLOAD = Payload({"rows": TensorRef("shm", (2, 3), "float32", b"where", 7)}, {"rows": None, "num_rows": 2})


def sent(value: Any) -> Any:
    codec = ServedPayloads()
    return codec.decode(codec.encode(value))


def flat_logprobs() -> FlatLogprobs:
    made = FlatLogprobs()
    made.append({3: Logprob(-0.5, 1, "c")})
    return made


PARAMS = SamplingParams(
    temperature=0.5,
    seed=1,
    stop=["x"],
    output_kind=RequestOutputKind.DELTA,
    structured_outputs=None,
    extra_args={"a": 1},
)
CHOICE = CompletionOutput(0, "hi", [1, 2], -1.5, [{1: Logprob(-1.0, 1, "h")}, {2: Logprob(-0.5)}], finish_reason="stop")


@pytest.mark.parametrize(
    "value",
    [
        StageRequest("a text", {"payloads": [b"\x00\xff"], "speaker_index": 1}),
        StageRequest(tokens_input([1, 2, 3])),
        StageRequest(tokens_input([1]), cache={"do_remote_prefill": True, "num_tokens": 1, "pages": b"\x00"}),
        StageRequest({"prompt": "w <image>", "mm_processor_kwargs": {"fps": 2.5}}),
        StageOutput("w-1"),
        StageOutput("w-1", prompt_cache=PromptCache(tokens_input([1], cache_salt="s"), {"pages": b"\x00\xff"})),
        StageOutput("w-1", row_names=TokenNames([5, 6], [Part(0, 1, "image:a")], "s")),
        StageOutput("w-1", [CHOICE], [5, 6], finished=True, payloads=[PAYLOAD], num_cached_tokens=3),
        StageOutput(
            "w-1", [CompletionOutput(1, "", [3], None, flat_logprobs())], prompt_logprobs=[None, {3: Logprob(-1)}]
        ),
        StageOutput("w-1", metrics=RequestStateStats(num_generation_tokens=4), lora_request=LoRARequest("l", 1, "/l")),
        RequestContext("r", {"writer": PARAMS, "painter": DiffusionParams(seed=3)}, {"speaker": "Ethan"}),
        RequestContext(
            "r", {}, {}, LoRARequest("l", 1, "/l"), -1, {"traceparent": "00"}, {"session_id": "s"}, ("text",), 2.5
        ),
        NodeReport("tool", 0.5),
        NodeReport(
            "writer",
            task=TaskTimes(Task.PREFILL, 1.0, 2.0, [Timeline(Task.PREFILL, [(Mark.QUEUED, 1.0)])], [(0, 1, 1.5)]),
            published=[PAYLOAD],
        ),
        "a text of a function",
        {"answer": [1, 2.5, None, {"nested": (StageRequest("w"), b"x")}], "both": (1, "two")},
        [1, StageOutput("w-1"), "x"],
        None,
    ],
    ids=lambda value: type(value).__name__,
)
def test_it_comes_back_as_it_was(value: Any) -> None:
    assert sent(value) == value


def test_parameters_keep_what_vllm_adds_to_them() -> None:
    params = SamplingParams(structured_outputs=StructuredOutputsParams(choice=["a"]), stop_token_ids=[7])
    params.update_from_generation_config({"eos_token_id": [5]}, eos_token_id=99)
    back = sent(RequestContext("r", {"writer": params}, {})).params["writer"]
    assert back == params and back.all_stop_token_ids == params.all_stop_token_ids
    assert back.clone().structured_outputs == params.structured_outputs


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int16, torch.float8_e4m3fn, torch.complex64])
def test_a_tensor_travels_as_a_reference_with_its_bytes(dtype: torch.dtype) -> None:
    tensor = torch.arange(6).view(3, 2).T.to(dtype)
    back = sent(StageOutput("w-1", multimodal_output={"images": tensor})).multimodal_output["images"]
    assert back.dtype is dtype and back.shape == (2, 3)
    assert torch.equal(back.contiguous().view(torch.uint8), tensor.contiguous().view(torch.uint8))
    back.zero_()  # it is the reader's own


def test_media_of_a_prompt_travel() -> None:
    image, sound = Image.new("LA", (3, 2), (7, 8)), np.arange(4, dtype=np.float32)
    media = {"image": [image], "audio": (sound, 16000), "video": np.zeros((2, 2, 2, 3), np.uint8)[::2]}
    back = sent(StageRequest({"prompt": "w", "multi_modal_data": media})).prompt["multi_modal_data"]
    assert back["image"][0].mode == "LA" and back["image"][0].tobytes() == image.tobytes()
    assert isinstance(back["audio"], tuple) and back["audio"][1] == 16000
    assert np.array_equal(back["audio"][0], sound) and back["audio"][0].dtype == np.float32
    assert back["video"].shape == (1, 2, 2, 3)


def test_a_rendered_prompt_travels_with_the_media_that_the_engine_lacks() -> None:
    item = MultiModalKwargsItem({"pixels": MultiModalFieldElem(data=torch.ones(2, 2), field=Batched())})
    prompt = {
        "type": "multimodal",
        "prompt_token_ids": [1, 2, 2],
        "mm_kwargs": MultiModalKwargsItems({"image": [item, None]}),
        "mm_hashes": {"image": ["a", "b"]},
        "mm_placeholders": {"image": [PlaceholderRange(1, 2, torch.tensor([True, False]))]},
    }
    back = sent(StageRequest(prompt)).prompt
    assert {name: back[name] for name in ("type", "prompt_token_ids", "mm_hashes")} == {
        name: prompt[name] for name in ("type", "prompt_token_ids", "mm_hashes")
    }
    found, missing = back["mm_kwargs"]["image"]
    assert missing is None and isinstance(back["mm_kwargs"], MultiModalKwargsItems)
    assert torch.equal(found.get_data()["pixels"], torch.ones(2, 2))
    (place,) = back["mm_placeholders"]["image"]
    assert (place.offset, place.length, place.is_embed.tolist()) == (1, 2, [True, False])


@pytest.mark.parametrize(
    "value",
    [object(), {"a": {1, 2}}, np.array([object()]), Image.new("P", (1, 1))],
    ids=["object", "set", "array", "picture"],
)
def test_what_cannot_travel_is_named(value: Any) -> None:
    with pytest.raises(TypeError, match=r"a (object|set|ndarray|Image) cannot travel"):
        sent([value])


@pytest.mark.parametrize("data", [b"\xc1", b"\xc7\x01\x63x", b"\xc7\x02\x10\x91\x00"], ids=repr)
def test_bytes_that_are_no_payload_are_an_error(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"payload|MessagePack|Expected|JSON|array|type"):
        ServedPayloads().decode(data)


def test_the_users_output_has_the_values_of_the_stages() -> None:
    output = StageOutput("w-1", [CHOICE], [5, 6], finished=True, payloads=[PAYLOAD], num_cached_tokens=3)
    users = output.to_request_output("user-1")
    assert (users.request_id, users.outputs, users.num_cached_tokens) == ("user-1", [CHOICE], 3)
    assert not users.payloads  # for stages
    assert StageOutput.of(OmniRequestOutput.of(users)).outputs == [CHOICE]


# -- messages ----------------------------------------------------------------------------------------------------------


def frame(payload: Any, reason: EndReason = EndReason.NONE) -> Frame:
    return Frame("call", "writer.write", ENTRY, 0, "text", 1, 0, True, payload, reason)


def delivered(message: Any) -> Any:
    codec = MessageCodec(ServedPayloads())
    (back,) = codec.decode(b"\x91" + codec.encode(message))
    return back


def test_messages_carry_structs() -> None:
    for message in (
        frame(StageOutput("w-1", [CHOICE])),
        frame(None, EndReason.UNREACHABLE),
        OpenCall("call", "writer.write", "g", ["text"], RequestContext("r", {}, {}), "s"),
    ):
        assert delivered(message) == message


@pytest.mark.parametrize(
    "error",
    [
        StageFailed("writer", "died"),
        StageUnavailable("writer", "restarting"),
        InvalidRequest("too long", param="prompt"),
        PoolExhausted("full", is_final=True),
        LinkError("lost"),
    ],
    ids=repr,
)
def test_an_error_keeps_its_class_and_what_it_names(error: OmniError) -> None:
    error.add_note("in node 'writer.write'")
    back = delivered(frame(error, EndReason.ERROR)).payload
    assert type(back) is type(error) and str(back) == str(error)
    assert vars(back) == vars(error)
