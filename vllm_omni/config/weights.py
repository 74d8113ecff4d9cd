"""Which tensors a checkpoint has, from the headers of its safetensors files; no weights are read."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from vllm_omni.errors import ConfigError

FLOAT_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}  # converted to the stage's dtype when they are loaded
HEADER_LENGTH_BYTES = 8  # at the start of a file, little-endian
MAX_HEADER_BYTES = 100_000_000  # of the format
# The files by the names that transformers and diffusers give them; others are variants, such as "model.fp16".
_FILE = re.compile(r"(model|diffusion_pytorch_model)(-\d+-of-\d+)?\.safetensors")
_INDEX = re.compile(r"(model|diffusion_pytorch_model)\.safetensors\.index\.json")


class StoredTensor(NamedTuple):
    """A tensor as its file describes it."""

    name: str
    dtype: str  # as in the format: "BF16"
    shape: tuple[int, ...]

    def num_bytes(self, float_bytes: int | None = None) -> int:
        """Bytes in memory; ``float_bytes``: of each element, where floats are converted to one dtype."""
        bits = re.search(r"\d+", self.dtype)  # "I64", "F8_E4M3"; none in "BOOL"
        stored = int(bits[0]) / 8 if bits else 1
        each = float_bytes if float_bytes and self.dtype in FLOAT_BYTES else stored
        return math.ceil(math.prod(self.shape) * each)


def read_tensors(model: str, folder: str = "", revision: str | None = None) -> list[StoredTensor]:
    """List the tensors of a checkpoint, or of one component's folder: in a directory, or on the Hub.

    Raises:
        ConfigError: a header cannot be read.
    """
    where = f"{model}/{folder}" if folder else model
    try:
        files = _open(model, revision)
        return [tensor for name in _weight_files(files, folder) for tensor in files.tensors(name)]
    except (OSError, ValueError, KeyError) as exc:  # those of requests are OSErrors
        raise ConfigError(f"{where}: the sizes of its weights cannot be read: {exc}") from exc


def check_files(model: str, folder: str = "", revision: str | None = None) -> None:
    """Check that the weights of a checkpoint, or of one component's folder, are whole: by their headers, if they are on
    this machine.

    Raises:
        ConfigError: a file is missing, has another length than its header says, or is in another format.
    """
    try:
        files = _open(model, revision)
        if isinstance(files, _Directory):
            for name in _weight_files(files, folder):
                files.check(name)
    except (OSError, ValueError, KeyError, TypeError) as exc:
        raise ConfigError(f"{model}: its weights are not whole: {exc}") from exc


class _Files(Protocol):
    """The files of a checkpoint, by their paths in it."""

    def names(self) -> Iterable[str]: ...

    def text(self, name: str) -> str: ...

    def tensors(self, name: str) -> Iterator[StoredTensor]: ...


class _Directory:
    def __init__(self, path: Path) -> None:
        self._path = path

    def names(self) -> Iterable[str]:
        return [path.relative_to(self._path).as_posix() for path in self._path.rglob("*.safetensors*")]

    def text(self, name: str) -> str:
        return (self._path / name).read_text(encoding="utf-8")

    def tensors(self, name: str) -> Iterator[StoredTensor]:
        for tensor, one in self._header(name)[0].items():
            yield StoredTensor(tensor, one["dtype"], tuple(one["shape"]))

    def check(self, name: str) -> None:
        """Raises ``ValueError`` if a file has another length than its header says, or ``OSError``."""
        header, data_at = self._header(name)
        size, whole = (self._path / name).stat().st_size, data_at
        whole += max((one["data_offsets"][1] for one in header.values()), default=0)
        if size != whole:
            raise ValueError(f"{name} has {size} bytes, and by its header {whole}: download or copy it again")

    def _header(self, name: str) -> tuple[dict[str, Any], int]:
        """What a file says of its tensors, by name, and where their bytes begin."""
        try:
            with (self._path / name).open("rb") as file:
                length = int.from_bytes(file.read(HEADER_LENGTH_BYTES), "little")
                if not 0 < length <= MAX_HEADER_BYTES:
                    raise ValueError(f"{name} is not in the format safetensors")
                text = file.read(length)
        except FileNotFoundError:
            raise ValueError(f"{name} is missing, which the index names") from None
        if len(text) < length:
            raise ValueError(f"{name} ends in its header: download or copy it again")
        header: dict[str, Any] = json.loads(text)
        header.pop("__metadata__", None)
        return header, HEADER_LENGTH_BYTES + length


class _Repository:
    """Of the Hub, not in the cache: only the headers of its files are fetched."""

    def __init__(self, name: str, revision: str | None) -> None:
        self._name, self._revision = name, revision

    def names(self) -> Iterable[str]:
        from huggingface_hub import list_repo_files

        names: list[str] = list_repo_files(self._name, revision=self._revision)
        return names

    def text(self, name: str) -> str:
        from huggingface_hub import hf_hub_download

        return Path(hf_hub_download(self._name, name, revision=self._revision)).read_text(encoding="utf-8")

    def tensors(self, name: str) -> Iterator[StoredTensor]:
        from huggingface_hub import HfApi

        found = HfApi().parse_safetensors_file_metadata(self._name, name, revision=self._revision).tensors
        return (StoredTensor(tensor, one.dtype, tuple(one.shape)) for tensor, one in found.items())


def _open(model: str, revision: str | None) -> _Files:
    directory = Path(model).expanduser()
    if directory.is_dir():
        return _Directory(directory)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        cached = _Directory(Path(snapshot_download(model, revision=revision, local_files_only=True)))
    except LocalEntryNotFoundError:
        return _Repository(model, revision)
    return cached if any(name.endswith(".safetensors") for name in cached.names()) else _Repository(model, revision)


def _weight_files(files: _Files, folder: str) -> Iterable[str]:
    """The files that are loaded: those of the index, if there is one; otherwise those with the usual names, or all."""
    prefix = f"{folder}/" if folder else ""
    found = [name.removeprefix(prefix) for name in files.names() if name.startswith(prefix)]
    names = [name for name in found if "/" not in name]
    if index := next(filter(_INDEX.fullmatch, names), None):
        chosen = sorted(set(json.loads(files.text(prefix + index))["weight_map"].values()))
    else:
        every = [name for name in names if name.endswith(".safetensors")]
        chosen = [name for name in every if _FILE.fullmatch(name)] or every
    return [prefix + name for name in chosen]
