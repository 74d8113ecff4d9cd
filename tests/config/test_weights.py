"""Sizes of a checkpoint's tensors, from the headers of its files."""

import json
from pathlib import Path

import huggingface_hub
import pytest
import torch
from huggingface_hub.errors import LocalEntryNotFoundError
from safetensors.torch import load_file, save_file

from vllm_omni.config.weights import StoredTensor, check_files, read_tensors
from vllm_omni.errors import ConfigError

TENSORS = {
    "a.weight": torch.zeros(3, 5, dtype=torch.bfloat16),
    "b.weight": torch.zeros(7, dtype=torch.float32),
    "b.index": torch.zeros(2, dtype=torch.int64),
    "b.mask": torch.zeros(9, dtype=torch.bool),
    "b.scaled": torch.zeros(4, 2, dtype=torch.float8_e4m3fn),
}


def sizes(tensors: list[StoredTensor], float_bytes: int | None = None) -> dict[str, int]:
    return {tensor.name: tensor.num_bytes(float_bytes) for tensor in tensors}


def test_sizes_are_those_of_the_loaded_tensors(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert sizes(read_tensors(str(tmp_path))) == {name: tensor.nbytes for name, tensor in TENSORS.items()}


def test_only_floats_are_converted(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "model.safetensors")
    found = sizes(read_tensors(str(tmp_path)), float_bytes=4)
    assert found == {"a.weight": 60, "b.weight": 28, "b.index": 16, "b.mask": 9, "b.scaled": 8}


def test_of_several_files_those_of_the_index_count(tmp_path: Path) -> None:
    for number in (1, 2):
        save_file({f"part{number}": torch.zeros(number)}, tmp_path / f"model-0000{number}-of-00002.safetensors")
    save_file({"whole": torch.zeros(3)}, tmp_path / "consolidated.safetensors")
    weight_map = {f"part{number}": f"model-0000{number}-of-00002.safetensors" for number in (1, 2)}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert sizes(read_tensors(str(tmp_path))) == {"part1": 4, "part2": 8}


def test_variants_of_a_component_do_not_count(tmp_path: Path) -> None:
    folder = tmp_path / "transformer"
    folder.mkdir()
    save_file({"x": torch.zeros(2)}, folder / "diffusion_pytorch_model.safetensors")
    save_file({"x": torch.zeros(2).half()}, folder / "diffusion_pytorch_model.fp16.safetensors")
    assert sizes(read_tensors(str(tmp_path), "transformer")) == {"x": 8}
    assert read_tensors(str(tmp_path), "scheduler") == []
    assert read_tensors(str(tmp_path)) == []


def test_a_file_that_is_no_safetensors_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 64)
    with pytest.raises(ConfigError, match=r"weights cannot be read: model\.safetensors is not in the format"):
        read_tensors(str(tmp_path))


def test_files_that_are_not_whole_are_named(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    save_file(TENSORS, file)
    whole = file.read_bytes()
    check_files(str(tmp_path))
    for content, said in {
        whole[:-1]: rf"model.safetensors has {len(whole) - 1} bytes, and by its header {len(whole)}",
        whole + b"x": rf"model.safetensors has {len(whole) + 1} bytes, and by its header {len(whole)}",
        whole[:20]: "model.safetensors ends in its header",
        b"": "model.safetensors is not in the format safetensors",
    }.items():
        file.write_bytes(content)
        with pytest.raises(ConfigError, match=f"its weights are not whole: {said}"):
            check_files(str(tmp_path))
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a.weight": "model-00001-of-00002.safetensors"}}))
    with pytest.raises(ConfigError, match=r"model-00001-of-00002\.safetensors is missing, which the index names"):
        check_files(str(tmp_path))


def test_of_a_repository_only_the_headers_are_fetched(tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The hub is a stand-in: the functions of its library that fetch something answer from a directory."""
    real = load_file(tiny_checkpoint / "model.safetensors")

    def no_snapshot(*args: object, **kwargs: object) -> str:
        raise LocalEntryNotFoundError("not in the cache")

    def metadata(self: object, name: str, file: str, revision: str | None) -> object:
        assert (name, file, revision) == ("someone/tiny", "model.safetensors", "v1")
        return huggingface_hub.utils.SafetensorsFileMetadata(
            metadata={},
            tensors={
                name: huggingface_hub.utils.TensorInfo(dtype="F32", shape=list(tensor.shape), data_offsets=(0, 0))
                for name, tensor in real.items()
            },
        )

    monkeypatch.setattr(huggingface_hub, "snapshot_download", no_snapshot)
    monkeypatch.setattr(
        huggingface_hub, "list_repo_files", lambda *args, **kwargs: ["config.json", "model.safetensors"]
    )
    monkeypatch.setattr(huggingface_hub.HfApi, "parse_safetensors_file_metadata", metadata)
    assert sizes(read_tensors("someone/tiny", revision="v1")) == {name: one.nbytes for name, one in real.items()}


def test_a_repository_that_cannot_be_reached_is_an_error() -> None:
    with pytest.raises(ConfigError, match="someone/nothing: the sizes of its weights cannot be read"):
        read_tensors("someone/nothing")
