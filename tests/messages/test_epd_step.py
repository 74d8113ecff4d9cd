from pathlib import Path

import pytest
from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs

from tests.text_model import make_config
from vllm_omni.config.budgets import ENCODE_IN, SLICES, THREAD, encodes_in_thread
from vllm_omni.errors import ConfigError
from vllm_omni.testing import llava as tiny_llava


@pytest.fixture
def llava(tmp_path: Path) -> VllmConfig:
    config = EngineArgs(model=str(tiny_llava.build(tmp_path)), dtype="float32").create_engine_config()
    config.additional_config = {"epd": {ENCODE_IN: THREAD}}
    return config


def test_images_are_encoded_in_a_thread_where_that_is_asked_for(llava: VllmConfig) -> None:
    assert encodes_in_thread(llava)
    llava.additional_config = {"epd": {ENCODE_IN: SLICES}}
    assert not encodes_in_thread(llava)


def test_several_ranks_are_rejected_before_they_load_anything(llava: VllmConfig) -> None:
    llava.parallel_config.world_size = 2
    with pytest.raises(ConfigError, match=r"one rank.*give 'slices'"):
        encodes_in_thread(llava)


def test_a_model_without_images_has_nothing_to_encode_in_a_thread() -> None:
    config = make_config(num_layers=1, num_heads=1, head_size=8, vocab_size=16, block_size=4)
    config.additional_config = {"epd": {ENCODE_IN: THREAD}}
    assert not encodes_in_thread(config)
