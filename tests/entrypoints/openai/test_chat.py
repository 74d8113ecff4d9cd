"""What a chat may ask for, without engines."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.outputs import RequestOutput

from vllm_omni.entrypoints.openai.chat import OmniServingChat
from vllm_omni.entrypoints.openai.chat_media import AnswerMedia
from vllm_omni.entrypoints.openai.protocol import OmniChatCompletionRequest
from vllm_omni.errors import InvalidRequest
from vllm_omni.messages.outputs import OmniRequestOutput

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "Draw a cat."}]}
KINDS = {"music": "audio", "sketch": "image"}


def make_chat(*modalities: str) -> OmniServingChat:
    chat = OmniServingChat.__new__(OmniServingChat)
    orchestrator = SimpleNamespace(modalities_of=lambda graph: {name: KINDS.get(name, name) for name in modalities})
    chat.omni = SimpleNamespace(  # type: ignore[assignment]
        orchestrator=orchestrator, graph_of=lambda model: None, check_replies=lambda: None
    )
    return chat


@pytest.mark.parametrize("stream", [False, True])
async def test_a_modality_that_chat_answers_cannot_have_is_rejected(stream: bool) -> None:
    request = OmniChatCompletionRequest(**CHAT, modalities=["text", "video"], stream=stream)
    with pytest.raises(InvalidRequest, match="'video' is not served in chat answers: valid: text, image") as rejected:
        await make_chat("text", "image", "video").create_chat_completion(request)
    assert rejected.value.param == "modalities"


async def test_a_chat_answer_has_one_sound() -> None:
    request = OmniChatCompletionRequest(**CHAT, modalities=["text", "music"])
    with pytest.raises(InvalidRequest, match="'music' is not served in chat answers: valid: text, audio, sketch"):
        await make_chat("text", "audio", "music", "sketch").create_chat_completion(request)


async def test_images_of_two_stages_are_told_apart_in_a_chat_answer() -> None:
    output = OmniRequestOutput.of(RequestOutput("a", None, [1], None, outputs=[], finished=True))
    pixels = torch.zeros(1, 2, 2, 3, dtype=torch.uint8)
    output.multimodal_output = {"images": pixels, "sketch.images": pixels, "critique": "so-so"}
    media = AnswerMedia({"text": "text", "image": "image", "sketch": "image", "critique": "text"})
    delta = await media.read(output)
    assert [(one["index"], one.get("name")) for one in delta["images"]] == [(0, None), (1, "sketch")]
    assert media.fields["texts"] == {"critique": "so-so"}


@pytest.mark.parametrize(("more", "param"), [({"n": 2}, "n"), ({"use_beam_search": True}, "use_beam_search")])
async def test_a_graph_without_text_makes_one_answer_also_by_default(more: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest, match="output beside the text") as rejected:
        await make_chat("image").create_chat_completion(OmniChatCompletionRequest(**CHAT, **more))
    assert rejected.value.param == param


def test_a_request_of_vllm_keeps_what_it_does_not_know() -> None:
    request = ChatCompletionRequest(**CHAT, modalities=["audio"], audio={"voice": "Ethan"}, temperature=0.5)
    ours = OmniChatCompletionRequest.of(request)
    assert (ours.modalities, ours.audio and ours.audio.voice, ours.temperature) == (["audio"], "Ethan", 0.5)
    assert ours.messages == request.messages
    assert OmniChatCompletionRequest.of(ours) is ours
    with pytest.raises(InvalidRequest, match=r"unknown field 'audio.vocie': did you mean 'voice'\?"):
        OmniChatCompletionRequest.of(ChatCompletionRequest(**CHAT, audio={"vocie": "Ethan"}))


def test_a_voice_may_be_an_object_with_an_id() -> None:
    for voice in ("Ethan", {"id": "Ethan"}):
        audio = OmniChatCompletionRequest(**CHAT, audio={"voice": voice}).audio
        assert audio is not None
        assert audio.speaker == "Ethan"
