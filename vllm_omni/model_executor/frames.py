"""Frames of a stage's field, for ``StageSpec.frames``: pieces that are the same however fast the stage is read.

An engine's outputs are not: vLLM puts the tokens of several steps into one where they are read late.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Protocol

from vllm.outputs import CompletionOutput, RequestOutput

from vllm_omni.messages.outputs import OmniRequestOutput

_SENTENCE = re.compile(r".*?[.!?。！？\n]+\s*", re.DOTALL)


class Framing(Protocol):
    """Cuts the outputs of one activation; made for each one."""

    def push(self, output: OmniRequestOutput) -> Iterator[OmniRequestOutput]:
        """The frames that are complete with this output."""

    def finish(self) -> Iterator[OmniRequestOutput]:
        """What is left at the end."""


class Whole:
    """One frame: everything. For fields that are not streamed."""

    def __init__(self) -> None:
        self._whole: OmniRequestOutput | None = None

    def push(self, output: OmniRequestOutput) -> Iterator[OmniRequestOutput]:
        if self._whole is None:  # a copy, since others read the same object
            self._whole = OmniRequestOutput.of(output)
            self._whole.outputs = [replace(one, token_ids=list(one.token_ids)) for one in output.outputs]
            self._whole.multimodal_output = dict(output.multimodal_output)
            self._whole.payloads = list(output.payloads)
        else:
            self._whole.add(output, aggregate=True)
        yield from ()

    def finish(self) -> Iterator[OmniRequestOutput]:
        if self._whole is not None:
            yield self._whole


class Tokens:
    """One frame for each token of the first answer: its id, without text."""

    def push(self, output: OmniRequestOutput) -> Iterator[OmniRequestOutput]:
        for token in output.outputs[0].token_ids if output.outputs else ():
            yield _frame(output, token_ids=[token])

    def finish(self) -> Iterator[OmniRequestOutput]:
        yield from ()


class Sentences:
    """One frame for each sentence or line of the first answer, and one for the rest: its text, without ids."""

    def __init__(self) -> None:
        self._rest = ""
        self._last: OmniRequestOutput | None = None

    def push(self, output: OmniRequestOutput) -> Iterator[OmniRequestOutput]:
        self._last = output
        self._rest += output.outputs[0].text if output.outputs else ""
        # One that reaches the end of the text so far may not be complete: "..." comes in three tokens.
        while (sentence := _SENTENCE.match(self._rest)) is not None and sentence.end() < len(self._rest):
            yield self._cut(sentence.end(), output)

    def finish(self) -> Iterator[OmniRequestOutput]:
        if self._last is not None and self._rest:
            yield self._cut(len(self._rest), self._last)

    def _cut(self, end: int, output: OmniRequestOutput) -> OmniRequestOutput:
        text, self._rest = self._rest[:end], self._rest[end:]
        return _frame(output, text)


class Images:
    """One frame for each image: ``images`` [1, H, W, 3]."""

    def push(self, output: OmniRequestOutput) -> Iterator[OmniRequestOutput]:
        for image in output.multimodal_output.get("images", ()):
            frame = _frame(output)
            frame.multimodal_output = {"images": image[None]}
            yield frame

    def finish(self) -> Iterator[OmniRequestOutput]:
        yield from ()


def _frame(output: OmniRequestOutput, text: str = "", token_ids: Sequence[int] = ()) -> OmniRequestOutput:
    completion = CompletionOutput(0, text, list(token_ids), None, None)
    prompt_token_ids = output.prompt_token_ids
    request = RequestOutput(output.request_id, None, prompt_token_ids, None, [completion], finished=False)
    return OmniRequestOutput.of(request)
