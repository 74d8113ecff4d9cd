"""Frames of a stage's field, for ``StageSpec.frames``: pieces that are the same however fast the stage is read.

An engine's outputs are not: vLLM puts the tokens of several steps into one where they are read late.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Protocol

from vllm.outputs import CompletionOutput, RequestOutput

from vllm_omni.messages.outputs import OmniRequestOutput, copy_completion

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
        copied = OmniRequestOutput.of(output)  # others read the same object
        copied.outputs = [copy_completion(one) for one in output.outputs]
        copied.multimodal_output = dict(output.multimodal_output)
        copied.payloads = list(output.payloads)
        if self._whole is None:
            self._whole = copied
        else:
            self._whole.add(copied, aggregate=True)
        yield from ()

    def finish(self) -> Iterator[OmniRequestOutput]:
        if self._whole is not None:
            yield self._whole


class Tokens:
    """One frame for each token of the first answer: its id, without text."""

    def push(self, output: OmniRequestOutput) -> Iterator[OmniRequestOutput]:
        for one in _first_answer(output):
            for token in one.token_ids:
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
        self._rest += "".join(one.text for one in _first_answer(output))
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


def _first_answer(output: OmniRequestOutput) -> list[CompletionOutput]:
    """Its piece, if there is one: of several answers (``n``), each output has those that have grown."""
    return [one for one in output.outputs if one.index == 0]


def _frame(output: OmniRequestOutput, text: str = "", token_ids: Sequence[int] = ()) -> OmniRequestOutput:
    completion = CompletionOutput(0, text, list(token_ids), None, None)
    prompt_token_ids = output.prompt_token_ids
    request = RequestOutput(output.request_id, None, prompt_token_ids, None, [completion], finished=False)
    return OmniRequestOutput.of(request)
