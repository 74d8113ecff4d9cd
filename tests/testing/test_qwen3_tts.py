"""Tiny Qwen3-TTS checkpoints: reproducible, and with the tensors of the real one."""

import pytest
from safetensors import safe_open

from vllm_omni.testing.qwen3_tts import VARIANTS, build


def test_the_same_arguments_write_the_same_bytes(tmp_path):
    one, two = (build(tmp_path / name, seed=3, variant="design") for name in ("one", "two"))
    other = build(tmp_path / "other", seed=4, variant="design")
    files = sorted(path.relative_to(one) for path in one.rglob("*") if path.is_file())
    assert len(files) == 10
    for file in files:
        assert (one / file).read_bytes() == (two / file).read_bytes(), file
    assert (one / "model.safetensors").read_bytes() != (other / "model.safetensors").read_bytes()


def test_an_unknown_variant_is_rejected_with_the_known_ones(tmp_path):
    with pytest.raises(ValueError, match=r"no variant 'bse'; known: .*base"):
        build(tmp_path, variant="bse")


def test_only_checkpoints_for_cloning_have_a_speaker_encoder(tmp_path):
    for name in ("base", "clone", "design"):
        with safe_open(build(tmp_path / name, variant=name) / "model.safetensors", "pt") as file:
            has_encoder = any(key.startswith("speaker_encoder.") for key in file.keys())  # noqa: SIM118
        assert has_encoder == (VARIANTS[name].kind == "base"), name
