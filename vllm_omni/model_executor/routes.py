"""Which of a stage's outputs goes to which field of the graph, for ``StageSpec.route``."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping

from vllm_omni.errors import GraphError
from vllm_omni.flow import Activation, Emission
from vllm_omni.messages.stage_output import StageOutput
from vllm_omni.model_executor.frames import Whole
from vllm_omni.names import suggest

KINDS: Mapping[str, Callable[[StageOutput], bool]] = {
    "text": lambda output: bool(output.outputs),
    "rows": lambda output: bool(output.payloads),
    "cache": lambda output: output.prompt_cache is not None,
    "image": lambda output: "images" in output.multimodal_output,
    "video": lambda output: "frames" in output.multimodal_output,
    "audio": lambda output: "audio" in output.multimodal_output,
    "latents": lambda output: "latents" in output.multimodal_output,
}
"""Kind of output -> whether an output has some of it."""


class ByKind:
    """Send each output to the fields of its kinds: ``ByKind(reply="text", picture="image")``.

    Attributes:
        reads_whole: of any route: whether it never ends a reply early, so that one into fields that are not streamed
            may come in one piece. Each piece costs a pass through the graph.

    Raises:
        GraphError: an unknown kind.
    """

    reads_whole = True

    def __init__(self, **fields: str) -> None:
        for field, kind in fields.items():
            if kind not in KINDS:
                raise GraphError(f"route of field {field!r}: kind {kind!r}: {suggest(kind, KINDS)}")
        self.fields = fields

    async def __call__(
        self, outputs: AsyncIterator[StageOutput], activation: Activation
    ) -> AsyncIterator[list[Emission]]:
        async for output in outputs:
            yield [
                Emission(field, output)
                for field, kind in self.fields.items()
                if field in activation.wanted and KINDS[kind](output)
            ]


class ByReply:
    """Send each reply as a whole to one field: ``ByReply(choose)``.

    Args:
        choose: the field of a reply, for instance of an agent, whose text either calls a tool or answers.
    """

    reads_whole = True

    def __init__(self, choose: Callable[[StageOutput, Activation], str]) -> None:
        self._choose = choose

    async def __call__(self, outputs: AsyncIterator[StageOutput], activation: Activation) -> AsyncIterator[Emission]:
        reply = Whole()
        async for output in outputs:
            reply.push(output)
            if output.finished:
                for whole in reply.finish():
                    yield Emission(self._choose(whole, activation), whole)
                reply = Whole()
