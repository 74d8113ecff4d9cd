"""``checkpoint_digest``: which weights a checkpoint has, without reading all of them."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

from vllm_omni.errors import ConfigError

SAMPLE_BYTES = 256  # at the start, in the middle and at the end of each tensor
LENGTH_BYTES = 8  # of a safetensors header, at the start of the file


def checkpoint_digest(model: str, revision: str | None = None) -> str:
    """Hash the headers of a checkpoint's safetensors files, and a sample of each tensor's bytes.

    Two checkpoints of one shape, a model and its fine-tuning, have other samples. A path would not tell them apart, nor
    do headers. Reads less than a kilobyte of a tensor.

    Args:
        model: directory of the checkpoint, or its id on the Hub, from which it has been downloaded.

    Raises:
        ConfigError: it has no such files.
    """
    folder = checkpoint_folder(model, revision)
    digest = hashlib.sha256()
    files = sorted(folder.rglob("*.safetensors"), key=lambda file: file.relative_to(folder).as_posix())
    for file in files:
        digest.update(file.relative_to(folder).as_posix().encode())
        _add_file(digest, file)
    if not files:
        raise ConfigError(f"{model}: cached pages are named by the weights, and it has no safetensors files")
    return digest.hexdigest()


def checkpoint_folder(model: str, revision: str | None = None) -> Path:
    """Where the files of a checkpoint are.

    Raises:
        ConfigError: it has not been downloaded.
    """
    folder = Path(model)
    if folder.is_dir():
        return folder
    try:
        return Path(snapshot_download(model, revision=revision, local_files_only=True))
    except (LocalEntryNotFoundError, HfHubHTTPError, ValueError) as exc:
        raise ConfigError(f"{model}: a checkpoint that has been downloaded is needed: {exc}") from exc


def _add_file(digest: hashlib._Hash, path: Path) -> None:
    with path.open("rb") as file:
        length = int.from_bytes(file.read(LENGTH_BYTES), "little")
        header = file.read(length)
        digest.update(header)
        start = LENGTH_BYTES + length
        for name, tensor in sorted(json.loads(header).items()):
            if name == "__metadata__":
                continue
            first, end = tensor["data_offsets"]
            for at in (first, (first + end) // 2, max(first, end - SAMPLE_BYTES)):
                file.seek(start + at)
                digest.update(file.read(min(SAMPLE_BYTES, end - at)))
