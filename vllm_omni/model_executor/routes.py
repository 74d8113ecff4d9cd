"""Which of a stage's outputs goes to which field of the graph, for ``StageSpec.route``."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping

from vllm_omni.errors import GraphError
from vllm_omni.flow import Activation, Emission
from vllm_omni.messages.stage_output import StageOutput
from vllm_omni.names import suggest

KINDS: Mapping[str, Callable[[StageOutput], bool]] = {
    "text": lambda output: bool(output.outputs),
    "rows": lambda output: bool(output.payloads),
    "image": lambda output: "images" in output.multimodal_output,
    "video": lambda output: "frames" in output.multimodal_output,
    "audio": lambda output: "audio" in output.multimodal_output,
    "latents": lambda output: "latents" in output.multimodal_output,
}
"""Kind of output -> whether an output has some of it."""


class ByKind:
    """Send each output to the fields of its kinds: ``ByKind(reply="text", picture="image")``.

    Raises:
        GraphError: an unknown kind.
    """

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
