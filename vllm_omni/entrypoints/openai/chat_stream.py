"""Merge the text stream of vLLM's chat handler with what the same answer has beside its text."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import aclosing
from typing import Any

from vllm_omni.entrypoints.openai.chat_media import AnswerMedia
from vllm_omni.entrypoints.openai.speech import Speech
from vllm_omni.entrypoints.openai.sse import DONE, Base64Pieces, event
from vllm_omni.messages.outputs import OmniRequestOutput


class MediaStream:
    """One reply on its way to the client.

    Upstream's generator reads the outputs with text (``read_text``) and writes lines. Those lines and the outputs with
    media pass through one queue, in their order. The queue holds one item, so that a client that reads slowly holds the
    engine back.

    Args:
        speech: encodes the reply's speech, if the client wants it.
    """

    def __init__(
        self,
        outputs: AsyncGenerator[OmniRequestOutput, None],
        speech: Speech | None,
        media: AnswerMedia,
        writer: ChatStreamWriter,
    ) -> None:
        self._outputs = outputs
        self._speech = speech
        self._media = media
        self._writer = writer
        self._events: asyncio.Queue[str | OmniRequestOutput | Exception | None] = asyncio.Queue(1)
        self._text_has_ended = False

    async def read_text(self) -> AsyncGenerator[OmniRequestOutput, None]:
        """The outputs with text, up to its end; media among them go to the queue."""
        async for output in self._outputs:
            if output.multimodal_output:
                await self._events.put(output)
            if not output.outputs:
                continue
            self._text_has_ended = output.outputs[0].finish_reason not in (None, "error")
            yield output
            if self._text_has_ended:
                return

    async def merge(self, lines: AsyncGenerator[str, None]) -> AsyncGenerator[str, None]:
        """Upstream's lines and those of the media; upstream's last lines come after the media.

        Closing it closes the outputs and the lines.
        """
        ending: list[str] = []  # finish_reason, usage, [DONE]
        early: list[OmniRequestOutput] = []  # media before the first line, which has the role and the fields of a chunk
        async with aclosing(self._outputs), aclosing(lines):
            reader = asyncio.create_task(self._read(lines))
            try:
                while (item := await self._events.get()) is not None:
                    if isinstance(item, Exception):
                        raise item
                    if isinstance(item, OmniRequestOutput):
                        early.append(item)
                    else:
                        for line in self._writer.rewrite(item):
                            if self._text_has_ended and self._writer.is_ending(line):
                                ending.append(line)
                            else:
                                yield line
                    while early and self._writer.has_started:
                        async for line in self._lines_of(early.pop(0)):
                            yield line
                if self._text_has_ended and self._speech is not None:
                    yield self._writer.end_of_audio(await self._speech.finish())
                if self._text_has_ended and not self._writer.has_ended:  # upstream skips the end of an empty text
                    yield self._writer.delta({}, "stop")
            finally:
                reader.cancel()
                await asyncio.gather(reader, return_exceptions=True)
            for line in ending:
                yield line

    async def _lines_of(self, output: OmniRequestOutput) -> AsyncIterator[str]:
        if self._speech is not None and (line := self._writer.audio(await self._speech.encode(output))):
            yield line
        if delta := await self._media.read(output):
            yield self._writer.delta(delta)

    async def _read(self, lines: AsyncGenerator[str, None]) -> None:
        """Fill the queue: lines, then outputs after the end of the text; at last an error or None."""
        end: Exception | None = None
        try:
            async for line in lines:
                await self._events.put(line)
            if self._text_has_ended:
                async for output in self._outputs:
                    await self._events.put(output)
        except Exception as exc:
            end = exc
        await self._events.put(end)


class ChatStreamWriter:
    """Writes the lines of a stream: upstream's, rewritten where needed, and those of the media."""

    def __init__(self, audio_id: str, wants_text: bool, *, is_spoken: bool = True) -> None:
        self._is_spoken = is_spoken
        self._audio_id: str | None = audio_id  # until it has been sent
        self._pieces = Base64Pieces()
        self._wants_text = wants_text
        self._head: dict[str, Any] = {}  # the first fields of every chunk
        self.has_ended = False  # whether a finish_reason has been written
        self._transcript = ""

    @property
    def has_started(self) -> bool:
        """Whether a chunk has been written."""
        return bool(self._head)

    def rewrite(self, line: str) -> Iterator[str]:
        """Split ``finish_reason`` from the text of a line; without text output, send the text as the transcript."""
        chunk = None if line == DONE else json.loads(line.removeprefix("data: "))
        if chunk is None or not chunk.get("choices"):
            yield line
            return
        self._head = {name: chunk[name] for name in ("id", "object", "created", "model")}
        (choice,) = chunk["choices"]
        self._move_text(choice["delta"])
        if choice.get("finish_reason") is None:
            yield line if self._wants_text else event(chunk)
            return
        self.has_ended = True
        if any(choice["delta"].values()):
            yield event({**chunk, "choices": [{**choice, "finish_reason": None, "stop_reason": None}]})
        ending = {name: choice[name] for name in ("index", "finish_reason", "stop_reason") if name in choice}
        yield event({**chunk, "choices": [{**ending, "delta": {}, "logprobs": None}]})

    def _move_text(self, delta: dict[str, Any]) -> None:
        """Add the text of a delta to the transcript; without text output, take it out of ``content``, in place."""
        content = delta.get("content")
        self._transcript += content or ""
        if self._wants_text or content is None:
            return
        delta["content"] = None
        if content and self._is_spoken:
            delta["audio"] = {**self._take_id(), "transcript": content}

    @staticmethod
    def is_ending(line: str) -> bool:
        """Whether a line belongs to the end of the stream: it has no delta."""
        if line == DONE:
            return True
        choices = json.loads(line.removeprefix("data: ")).get("choices")
        return not choices or choices[0]["finish_reason"] is not None

    def audio(self, data: bytes) -> str | None:
        """The line of a piece of the speech, if it is long enough to be sent."""
        piece = self._pieces.encode(data)
        return self._audio({"data": piece}) if piece else None

    def end_of_audio(self, data: bytes) -> str:
        """The line of the last piece, with the transcript unless that was sent in pieces.

        It has ``data`` in any case: clients that join the pieces find a text then, also where nothing was spoken.
        """
        rest = {"data": self._pieces.encode(data, is_last=True)}
        transcript = {"transcript": self._transcript} if self._wants_text else {}
        return self._audio({**rest, **transcript, "expires_at": int(time.time())})

    def _take_id(self) -> dict[str, str]:
        """The id in the first delta with audio, nothing afterwards: clients join the texts of a field."""
        audio_id, self._audio_id = self._audio_id, None
        return {} if audio_id is None else {"id": audio_id}

    def _audio(self, audio: dict[str, Any]) -> str:
        return self.delta({"audio": {**self._take_id(), **audio}})

    def delta(self, delta: dict[str, Any], finish_reason: str | None = None) -> str:
        """The line of a delta."""
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
        return event({**self._head, "choices": [choice]})
