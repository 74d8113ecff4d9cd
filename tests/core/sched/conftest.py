import pytest
from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs

from vllm_omni.model_executor.models.qwen2_5_omni.token2wav import token2wav_hf_config
from vllm_omni.plugin import register
from vllm_omni.testing import qwen2_5_omni as tiny


@pytest.fixture(scope="session")
def generation_vllm_config(tmp_path_factory: pytest.TempPathFactory) -> VllmConfig:
    """Configuration of a stage without token steps, two requests at a time."""
    register()
    config = EngineArgs(
        model=str(tiny.build(tmp_path_factory.mktemp("checkpoint"))),
        dtype="float32",
        hf_overrides=token2wav_hf_config,
        skip_tokenizer_init=True,
        enable_prefix_caching=False,
        max_num_seqs=2,
        max_model_len=16,
    ).create_engine_config()
    config.cache_config.num_gpu_blocks = 1  # set by the engine core, which plans no cache for such a stage
    return config
