"""A function that computes for long, in a process of its own."""

import os
from collections.abc import AsyncIterator
from pathlib import Path

from vllm_omni.flow import Activation, Emission

DIRECTORY = "VLLM_OMNI_FILES_DIR"
"""The environment variable that names a directory; while it has the file HOLD, the function computes. Of this package,
so that a process need not be started for it: another variable's change would cost a fork server."""
HOLD = "pondering/hold"


async def ponder(activation: Activation) -> AsyncIterator[Emission]:
    """Say the text backwards."""
    text = ""
    async for chunk in activation.inputs["text"]:
        if chunk.payload is not None:
            text += "".join(one.text for one in chunk.payload.outputs)
    compute(Path(os.environ.get(DIRECTORY, "")), activation.call_id)
    yield Emission("comment", text[::-1])


def compute(directory: Path, call_id: str) -> None:
    """Compute without a pause for as long as the file is there; another file says for which call."""
    if (hold := directory / HOLD).exists():
        hold.with_name(call_id).touch()
        while hold.exists():
            pass
