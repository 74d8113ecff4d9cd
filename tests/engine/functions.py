"""A function of a pipeline that runs in processes of its own; they import this file, which imports no vLLM."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec

from vllm_omni.errors import StageFailed
from vllm_omni.flow import Activation, Emission


class PlainValues:
    """In the place of ``ServedPayloads``, which imports vLLM: msgpack's own types."""

    def encode(self, value: Any) -> bytes:
        return msgspec.msgpack.encode(value)

    def decode(self, data: bytes) -> Any:
        return msgspec.msgpack.decode(data)


CODEC = "tests.engine.functions:PlainValues"


async def act(activation: Activation) -> AsyncIterator[Any]:
    """Do what the payload says: a text is turned into capitals, a mapping names something else."""
    async for chunk in activation.inputs["call"]:
        match chunk.payload:
            case str():
                yield Emission("result", chunk.payload.upper(), last=chunk.last)
            case {"do": "block", "in": directory}:
                block(Path(directory))
                yield Emission("result", "done")
            case {"do": "wait", "in": directory}:
                await wait(Path(directory), activation)
            case {"do": "raise"}:
                raise KeyError("bad")
            case {"do": "return", "value": value}:
                yield Emission("result", value)
            case {"do": "return context"}:
                yield Emission("result", activation.context)
            case {"do": "emit no value"}:
                yield Emission("result", {"parts": [iter([])]})
            case {"do": "emit no emission"}:
                yield "text"
            case {"do": "count", "to": number}:
                for one in range(number):
                    yield Emission("result", one)
            case {"do": "read the rest"}:
                try:
                    async for _ in activation.inputs["call"]:
                        pass
                except StageFailed as exc:
                    yield Emission("result", exc.stage)
                    raise


def block(directory: Path) -> None:
    """Compute until a file is there."""
    (directory / "blocks").touch()
    while not (directory / "go").exists():
        pass


async def wait(directory: Path, activation: Activation) -> None:
    """Wait until it is cancelled; then look for further input."""
    (directory / "waits").touch()
    try:
        await asyncio.Event().wait()
    finally:
        num_left = len([chunk async for chunk in activation.inputs["call"]])
        (directory / "cleaned up").write_text(str(num_left))
