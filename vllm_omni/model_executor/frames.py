"""Frames of a stage's field, for ``StageSpec.frames``: pieces that are the same however fast the stage is read.

An engine's outputs are not: vLLM puts the tokens of several steps into one where they are read late.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Protocol

from msgspec import structs
from vllm.outputs import CompletionOutput, RequestOutput

from vllm_omni.messages.outputs import copy_completion, join_multimodal
from vllm_omni.messages.stage_output import StageOutput

_SENTENCE = re.compile(r".*?[.!?。！？\n]+\s*", re.DOTALL)


class Framing(Protocol):
    """Cuts the outputs of one activation; made for each one."""

    def push(self, output: StageOutput) -> Iterator[StageOutput]:
        """The frames that are complete with this output."""

    def finish(self) -> Iterator[StageOutput]:
        """What is left at the end."""


class Whole:
    """One frame: everything. For fields that are not streamed."""

    def __init__(self) -> None:
        self._outputs: list[StageOutput] = []

    def push(self, output: StageOutput) -> Iterator[StageOutput]:
        self._outputs.append(output)
        return iter(())

    def finish(self) -> Iterator[StageOutput]:
        if len(self._outputs) == 1:
            yield self._outputs[0]
        elif self._outputs:
            yield self._merged()

    def _merged(self) -> StageOutput:
        """Everything in a new output: others read the objects of the pieces. Media are joined once, at the end."""
        first, *later = self._outputs
        whole = first.to_request_output(first.request_id)
        whole.outputs = [copy_completion(one) for one in first.outputs]
        for output in later:
            known = [one.index for one in whole.outputs]
            piece = output.to_request_output(output.request_id)
            piece.outputs = [one if one.index in known else copy_completion(one) for one in output.outputs]
            RequestOutput.add(whole, piece, aggregate=True)
        whole.payloads = [payload for output in self._outputs for payload in output.payloads]
        whole.prompt_cache = self._outputs[-1].prompt_cache
        whole.multimodal_output = join_multimodal([output.multimodal_output for output in self._outputs])
        return StageOutput.of(whole)


class Tokens:
    """One frame for each token of the first answer: its id, without text."""

    def push(self, output: StageOutput) -> Iterator[StageOutput]:
        for one in _first_answer(output):
            for token in one.token_ids:
                yield _frame(output, token_ids=[token])

    def finish(self) -> Iterator[StageOutput]:
        yield from ()


class Sentences:
    """One frame for each sentence or line of the first answer, and one for the rest: its text, without ids."""

    def __init__(self) -> None:
        self._rest = ""
        self._last: StageOutput | None = None

    def push(self, output: StageOutput) -> Iterator[StageOutput]:
        self._last = output
        self._rest += "".join(one.text for one in _first_answer(output))
        # One that reaches the end of the text so far may not be complete: "..." comes in three tokens.
        while (sentence := _SENTENCE.match(self._rest)) is not None and sentence.end() < len(self._rest):
            yield self._cut(sentence.end(), output)

    def finish(self) -> Iterator[StageOutput]:
        if self._last is not None and self._rest:
            yield self._cut(len(self._rest), self._last)

    def _cut(self, end: int, output: StageOutput) -> StageOutput:
        text, self._rest = self._rest[:end], self._rest[end:]
        return _frame(output, text)


class Images:
    """One frame for each image: ``images`` [1, H, W, 3]."""

    def push(self, output: StageOutput) -> Iterator[StageOutput]:
        for image in output.multimodal_output.get("images", ()):
            yield structs.replace(_frame(output), multimodal_output={"images": image[None]})

    def finish(self) -> Iterator[StageOutput]:
        yield from ()


def _first_answer(output: StageOutput) -> list[CompletionOutput]:
    """Its piece, if there is one: of several answers (``n``), each output has those that have grown."""
    return [one for one in output.outputs if one.index == 0]


def _frame(output: StageOutput, text: str = "", token_ids: Sequence[int] = ()) -> StageOutput:
    completion = CompletionOutput(0, text, list(token_ids), None, None)
    return StageOutput(output.request_id, [completion], output.prompt_token_ids)
