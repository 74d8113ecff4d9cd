"""Where a command writes its answer, and why it cannot."""

import os
import re
from pathlib import Path

from vllm_omni.errors import ConfigError


def check_writable(path: Path) -> None:
    """Raise ``ConfigError`` if the file could not be written; makes nothing."""
    if path.is_dir():
        raise ConfigError(f"--output {path}: it is a directory")
    existing = next(parent for parent in path.absolute().parents if parent.exists())
    if not existing.is_dir():
        raise ConfigError(f"--output {path}: {existing} is not a directory")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise ConfigError(f"--output {path}: {existing} cannot be written to")


def reason(exc: BaseException) -> str:
    """The one line that says most: the system's words for what stopped a file or a connection, or the first line."""
    deepest: BaseException | None = exc
    while deepest is not None:
        if isinstance(deepest, OSError) and deepest.strerror:
            return deepest.strerror
        deepest = deepest.__cause__ or deepest.__context__
    said = (str(exc).strip() or type(exc).__name__).splitlines()[0]
    said = said.removeprefix("the prompt or its media cannot be read: ")
    return re.sub(r" ?<\S+ object at 0x[0-9a-f]+>", "", said)
