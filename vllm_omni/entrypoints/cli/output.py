"""Write a command's answer: the path of ``--output``, files, times, and the reason for a failure."""

import os
import sys
import tempfile
from collections.abc import Callable, Collection, Sequence
from itertools import chain
from pathlib import Path

from vllm_omni.config import OmniConfig
from vllm_omni.entrypoints.cli.parser import reason
from vllm_omni.errors import ConfigError, OmniError
from vllm_omni.media.audio import AUDIO_SUFFIXES
from vllm_omni.media.image import IMAGE_SUFFIXES
from vllm_omni.media.video import VIDEO_SUFFIXES
from vllm_omni.messages.outputs import OmniRequestOutput
from vllm_omni.names import suggest

SUFFIXES: dict[str, Collection[str]] = {"image": IMAGE_SUFFIXES, "video": VIDEO_SUFFIXES, "audio": AUDIO_SUFFIXES}
"""Modality -> the suffixes of its files."""
DEFAULT_NAMES = {"image": "answer.png", "video": "answer.mp4", "audio": "answer.wav"}


def answer_path(output: str | None, modality: str | None = None) -> Path:
    """The file that ``--output`` names, or ``DEFAULT_NAMES`` in the directory that it names; creates nothing.

    Args:
        modality: of the answer; None: not known yet.

    Raises:
        ConfigError: the suffix is not one of this modality.
    """
    path = Path(output or "")
    if not output or path.is_dir() or output.endswith(os.sep) or not path.suffix:
        return path / DEFAULT_NAMES[modality or "audio"]
    if modality is None:
        known, why = list(chain(*SUFFIXES.values())), f"unknown suffix {path.suffix!r}"
    else:
        known, why = list(SUFFIXES[modality]), f"this model answers in {modality}"
    suffix = path.suffix.lower()
    if suffix not in known:
        raise ConfigError(f"--output {output}: {why}: {suggest(suffix, known)}; a directory ends in {os.sep!r}")
    return path


def check_writable(path: Path) -> None:
    """Raise ``ConfigError`` if the file could not be written; creates nothing."""
    if path.is_dir():
        raise ConfigError(f"--output {path}: it is a directory")
    existing = next(parent for parent in path.absolute().parents if parent.exists())
    if not existing.is_dir():
        raise ConfigError(f"--output {path}: {existing} is not a directory")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise ConfigError(f"--output {path}: {existing} cannot be written to")


def save_files(path: Path, save: Callable[[Path], Sequence[Path]], what: str) -> list[Path]:
    """Write files in a temporary directory beside ``path`` and move them into place: a failure leaves nothing.

    Args:
        save: writes the files for a path, and returns their paths.

    Raises:
        OmniError: a file cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{path.name}-", dir=path.parent) as directory:
            saved = save(Path(directory) / path.name)
            return [one.replace(path.parent / one.name).resolve() for one in saved]
    except OSError as exc:
        raise OmniError(f"{what} cannot be written to {path}: {reason(exc)}") from exc


def print_start(config: OmniConfig) -> None:
    print(f"starting {', '.join(config.stage_names)} of {config.model} ...", file=sys.stderr, flush=True)


def print_times(output: OmniRequestOutput) -> None:
    times = ", ".join(f"{stage} {seconds:.2f} s" for stage, seconds in output.stage_durations.items())
    print(f"time    {times}", file=sys.stderr)


def stage_seconds(output: OmniRequestOutput) -> dict[str, float]:
    """For ``--json``."""
    return {stage: round(seconds, 4) for stage, seconds in output.stage_durations.items()}
