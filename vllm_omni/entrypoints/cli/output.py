"""Where a command writes its answer, and why it cannot."""

import os
import re
from collections.abc import Collection
from pathlib import Path

from vllm_omni.errors import ConfigError
from vllm_omni.media.audio import AUDIO_SUFFIXES
from vllm_omni.media.image import IMAGE_SUFFIXES
from vllm_omni.media.video import VIDEO_SUFFIXES
from vllm_omni.names import suggest

SUFFIXES: dict[str, Collection[str]] = {"image": IMAGE_SUFFIXES, "video": VIDEO_SUFFIXES, "audio": AUDIO_SUFFIXES}
"""Modality -> the suffixes of its files."""
DEFAULT_NAMES = {"image": "answer.png", "video": "answer.mp4", "audio": "answer.wav"}


def answer_path(output: str | None, modality: str | None = None) -> Path:
    """The file that ``--output`` names, or ``DEFAULT_NAMES`` in the directory that it names; makes nothing.

    Args:
        modality: of the answer; None: not known yet.

    Raises:
        ConfigError: a suffix that no file of this modality has.
    """
    default = DEFAULT_NAMES[modality or "audio"]
    if output is None:
        return Path(default)
    path = Path(output)
    if path.is_dir() or output.endswith(os.sep) or not path.suffix:
        return path / default
    suffix = path.suffix.lower()
    known = SUFFIXES[modality] if modality else [one for suffixes in SUFFIXES.values() for one in suffixes]
    if suffix not in known:
        said = f"unknown suffix {path.suffix!r}" if modality is None else f"this model answers in {modality}"
        raise ConfigError(f"--output {output}: {said}: {suggest(suffix, known)}; a directory ends in {os.sep!r}")
    return path


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
