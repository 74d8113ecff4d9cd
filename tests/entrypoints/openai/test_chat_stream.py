"""How text and speech of one reply are merged, without an engine and without vLLM's handler."""

import asyncio
import base64
import json
from collections.abc import AsyncGenerator, Iterable
from typing import Any

import pytest
import torch
from openai.lib.streaming._deltas import accumulate_delta
from vllm.outputs import CompletionOutput, RequestOutput

from vllm_omni.entrypoints.openai.chat_media import AnswerMedia
from vllm_omni.entrypoints.openai.chat_stream import DONE, ChatStreamWriter, MediaStream
from vllm_omni.entrypoints.openai.sse import event
from vllm_omni.errors import StageFailed
from vllm_omni.messages.outputs import OmniRequestOutput


def make_output(text: str | None = None, finish_reason: str | None = None, num_samples: int = 0) -> OmniRequestOutput:
    completions = [] if text is None else [CompletionOutput(0, text, [1], None, None, finish_reason=finish_reason)]
    output = OmniRequestOutput.of(RequestOutput("chat", None, [1], None, completions, finished=False))
    if num_samples:
        output.multimodal_output["audio"] = torch.zeros(num_samples)
    return output


class Samples:
    """Stands for ``Speech``: each sample is a byte of the file."""

    async def encode(self, output: OmniRequestOutput) -> bytes:
        return bytes(len(output.multimodal_output.get("audio", ())))

    async def finish(self) -> bytes:
        return b"end"


def chunk(delta: dict[str, Any], finish_reason: str | None = None) -> str:
    choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
    head = {"id": "chat", "object": "chat.completion.chunk", "created": 1, "model": "tiny"}
    return f"data: {json.dumps({**head, 'choices': [choice]})}\n\n"


async def write_lines(stream: MediaStream) -> AsyncGenerator[str, None]:
    """What vLLM's generator writes for the text."""
    async for output in stream.read_text():
        yield chunk({"content": output.outputs[0].text}, output.outputs[0].finish_reason)
    yield DONE


async def stream_of(
    outputs: Iterable[OmniRequestOutput | Exception], closed: list[str], wants_text: bool = True
) -> list[str]:
    """The stream of a reply, in short: text, transcript, number of bytes of audio, how it ends."""

    async def generate() -> AsyncGenerator[OmniRequestOutput, None]:
        try:
            for output in outputs:
                await asyncio.sleep(0)
                if isinstance(output, Exception):
                    raise output
                yield output
        finally:
            closed.append("outputs")

    stream = MediaStream(
        generate(), Samples(), AnswerMedia({"audio": "audio"}), ChatStreamWriter("audio-chat", wants_text)
    )  # type: ignore[arg-type]
    seen: list[str] = []
    message: dict[Any, Any] = {}  # as OpenAI's client makes it of the stream
    async for line in stream.merge(write_lines(stream)):
        if line == DONE:
            seen.append("DONE")
            continue
        (choice,) = json.loads(line.removeprefix("data: "))["choices"]
        accumulate_delta(message, choice["delta"])
        audio = choice["delta"].get("audio", {})
        seen += [f"text {text}"] if (text := choice["delta"].get("content")) else []
        seen += [f"audio {len(base64.b64decode(data))}"] if (data := audio.get("data")) else []
        seen += [f"transcript {text}"] if (text := audio.get("transcript")) else []
        seen += [choice["finish_reason"]] if choice["finish_reason"] else []
    assert message["audio"]["id"] == "audio-chat"
    return [*seen, f"file {len(base64.b64decode(message['audio']['data'], validate=True))}"]


REPLY = (
    make_output("Hel"),
    make_output(num_samples=2),
    make_output("lo.", "stop"),
    make_output(num_samples=4),
    make_output(num_samples=1),
)


def test_the_text_ends_after_the_speech() -> None:
    closed: list[str] = []
    assert asyncio.run(stream_of(REPLY, closed)) == [
        "text Hel", "text lo.", "audio 6", "audio 4", "transcript Hello.", "stop", "DONE", "file 10",
    ]  # fmt: skip
    assert closed == ["outputs"]


def test_without_text_output_the_text_is_sent_as_transcript() -> None:
    assert asyncio.run(stream_of(REPLY, [], wants_text=False)) == [
        "transcript Hel", "transcript lo.", "audio 6", "audio 4", "stop", "DONE", "file 10",
    ]  # fmt: skip


def test_a_failure_after_the_text_reaches_the_caller() -> None:
    closed: list[str] = []
    with pytest.raises(StageFailed, match="talker"):
        asyncio.run(stream_of([*REPLY[:3], StageFailed("talker", "it died")], closed))
    assert closed == ["outputs"]


def test_a_client_that_leaves_closes_the_outputs() -> None:
    closed: list[str] = []

    async def leave() -> None:
        async def generate() -> AsyncGenerator[OmniRequestOutput, None]:
            try:
                while True:
                    yield make_output("more")
            finally:
                closed.append("outputs")

        stream = MediaStream(
            generate(), Samples(), AnswerMedia({"audio": "audio"}), ChatStreamWriter("audio-chat", True)
        )  # type: ignore[arg-type]
        merged = stream.merge(write_lines(stream))
        await anext(merged)
        await merged.aclose()

    asyncio.run(leave())
    assert closed == ["outputs"]


def test_images_before_the_text_follow_its_first_chunk_and_can_be_joined() -> None:
    async def generate() -> AsyncGenerator[OmniRequestOutput, None]:
        for text, finish_reason in ((None, None), ("x", "stop"), (None, None)):
            output = make_output(text, finish_reason)
            output.multimodal_output["images"] = torch.zeros(1, 2, 2, 3, dtype=torch.uint8)
            yield output

    async def read() -> list[dict[str, Any]]:
        writer = ChatStreamWriter("audio-chat", True, is_spoken=False)
        stream = MediaStream(generate(), None, AnswerMedia({"text": "text", "image": "image"}), writer)
        return [
            json.loads(line.removeprefix("data: ")) async for line in stream.merge(write_lines(stream)) if line != DONE
        ]

    chunks = asyncio.run(read())
    assert {(one["id"], one["object"], one["created"], one["model"]) for one in chunks} == {
        ("chat", "chat.completion.chunk", 1, "tiny")
    }
    deltas = [one["choices"][0]["delta"] for one in chunks]
    assert deltas[0] == {"content": "x"}
    message: dict[Any, Any] = {}  # as OpenAI's client makes it of the stream
    for delta in deltas:
        accumulate_delta(message, delta)
    assert [image["index"] for image in message["images"]] == [0, 1, 2]


def test_an_answer_without_tokens_ends_with_a_reason() -> None:
    async def generate() -> AsyncGenerator[OmniRequestOutput, None]:
        yield make_output("", "stop")

    async def write_head(stream: MediaStream) -> AsyncGenerator[str, None]:
        async for _ in stream.read_text():
            yield chunk({"role": "assistant"})  # and nothing of an empty text
        yield DONE

    async def read() -> list[str]:
        stream = MediaStream(generate(), None, AnswerMedia({}), ChatStreamWriter("", True))
        return [line async for line in stream.merge(write_head(stream))]

    assert asyncio.run(read()) == [chunk({"role": "assistant"}), event(json.loads(chunk({}, "stop")[6:])), DONE]
