"""What hosts of a deployment compare before one joins."""

from pathlib import Path

import pytest

from vllm_omni.engine.hosting import CONFIGURATION, identity_of
from vllm_omni.errors import ConfigError
from vllm_omni.testing import qwen2_5_omni as tiny


def test_equal_checkpoints_are_one_and_another_configuration_or_weights_are_not(tmp_path: Path) -> None:
    first, second = (tiny.build(tmp_path / name) for name in ("first", "second"))
    assert identity_of(str(first), None) == identity_of(str(second), None)
    config = second / CONFIGURATION[0]
    text = config.read_text()
    config.write_text(text + " ")
    assert identity_of(str(first), None) != identity_of(str(second), None)
    config.write_text(text)
    (weights, *_) = sorted(second.glob("*.safetensors"))
    data = bytearray(weights.read_bytes())
    data[-1] ^= 0xFF
    weights.write_bytes(data)
    assert identity_of(str(first), None) != identity_of(str(second), None)


def test_a_checkpoint_that_is_not_there_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ConfigError, match="a checkpoint that has been downloaded is needed"):
        identity_of("nobody/nothing", None)
