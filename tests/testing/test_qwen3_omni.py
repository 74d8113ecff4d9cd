"""Tiny Qwen3-Omni checkpoints: reproducible, and with ids that leave room for each other."""

import pytest

from vllm_omni.testing.qwen3_omni import VARIANTS, build


def test_the_same_arguments_write_the_same_bytes(tmp_path):
    one, two = (build(tmp_path / name, seed=3, variant="eight") for name in ("one", "two"))
    files = sorted(path.relative_to(one) for path in one.rglob("*") if path.is_file())
    assert len(files) >= 6
    for file in files:
        assert (one / file).read_bytes() == (two / file).read_bytes(), file


def test_an_unknown_variant_is_rejected_with_the_known_ones(tmp_path):
    with pytest.raises(ValueError, match=r"no variant 'bse'; known: .*base"):
        build(tmp_path, variant="bse")


def test_ids_of_the_talker_stand_above_its_codes():
    for name, shape in VARIANTS.items():
        assert min(shape.codec_id(one) for one in ("pad", "ethan", "eos")) >= shape.num_codes, name
        assert shape.accept_layer < shape.thinker_layers, name
