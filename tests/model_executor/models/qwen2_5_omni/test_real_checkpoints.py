"""The published checkpoints load by their real names: every tensor that transformers' classes have, at its real shape.

Nothing is allocated: the key lists come from transformers' classes on the meta device, where our models are, too.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen2_5OmniConfig, Qwen2_5OmniForConditionalGeneration
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import cleanup_dist_env_and_memory, init_distributed_environment, initialize_model_parallel
from vllm.engine.arg_utils import EngineArgs

from tests.meta_models import on_meta_device
from vllm_omni.model_executor.models.qwen2_5_omni.pipeline import Qwen2_5OmniPipeline
from vllm_omni.model_executor.models.qwen2_5_omni.talker import Qwen2_5OmniTalker
from vllm_omni.model_executor.models.qwen2_5_omni.thinker import Qwen2_5OmniThinker
from vllm_omni.model_executor.models.qwen2_5_omni.token2wav import Qwen2_5OmniToken2Wav
from vllm_omni.model_executor.pipeline import StageSpec
from vllm_omni.plugin import register

ROPE = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]}
# Where the published config.json files differ from the defaults of transformers' configuration classes.
PUBLISHED: dict[str, dict[str, Any]] = {
    "3B": {
        "text": {
            "hidden_size": 2048,
            "intermediate_size": 11008,
            "num_hidden_layers": 36,
            "num_attention_heads": 16,
            "num_key_value_heads": 2,
            "vocab_size": 151936,
        },
        "talker": {
            "embedding_size": 2048,
            "hidden_size": 896,
            "intermediate_size": 4864,
            "num_hidden_layers": 24,
            "num_attention_heads": 14,
            "num_key_value_heads": 2,
            "head_dim": 64,
            "rope_parameters": ROPE | {"mrope_section": [16, 8, 8]},
        },
    },
    "7B": {
        "text": {
            "hidden_size": 3584,
            "intermediate_size": 18944,
            "num_hidden_layers": 28,
            "num_attention_heads": 28,
            "num_key_value_heads": 4,
            "vocab_size": 152064,
        },
        "talker": {
            "embedding_size": 3584,
            "hidden_size": 896,
            "intermediate_size": 18944,
            "num_hidden_layers": 24,
            "num_attention_heads": 12,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "rope_parameters": ROPE,
        },
    },
}


@pytest.fixture(scope="module", autouse=True)
def one_process_group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """vLLM's parallel layers ask for a group, also where it has one member."""
    register()
    init_method = f"file://{tmp_path_factory.mktemp('group')}/rendezvous"
    with set_current_vllm_config(VllmConfig()):
        init_distributed_environment(1, 0, init_method, 0, "gloo")
        initialize_model_parallel(1, 1)
    yield
    cleanup_dist_env_and_memory()


@pytest.fixture(scope="module", params=PUBLISHED)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A directory with a published configuration, and its tensors on the meta device by their real names."""
    sizes = PUBLISHED[request.param]
    hidden_size = sizes["text"]["hidden_size"]
    config = Qwen2_5OmniConfig(
        thinker_config={
            "text_config": sizes["text"] | {"rope_parameters": ROPE},
            "vision_config": {"out_hidden_size": hidden_size},
            "audio_config": {"output_dim": hidden_size},
        },
        talker_config=sizes["talker"],
        architectures=["Qwen2_5OmniModel"],
    )
    path = tmp_path_factory.mktemp(request.param)
    config.save_pretrained(path)
    speaker = {"bos_token": 151672, "cond": torch.zeros(1, 192), "ref_mel": torch.zeros(1, 300, 80)}
    torch.save({"Chelsie": speaker, "Ethan": speaker}, path / "spk_dict.pt")
    with torch.device("meta"):
        model = Qwen2_5OmniForConditionalGeneration._from_config(config)
    assert json.loads((path / "config.json").read_text())["model_type"] == "qwen2_5_omni"
    return path, dict(model.state_dict())


def make_config(path: Path, stage: str) -> tuple[VllmConfig, StageSpec]:
    pipeline = Qwen2_5OmniPipeline(str(path), Qwen2_5OmniConfig.from_pretrained(path))
    spec = next(spec for spec in pipeline.stages if spec.name == stage)
    args = EngineArgs(
        model=str(path),
        max_model_len=2048,
        dtype="bfloat16",
        hf_overrides=spec.hf_overrides or {"architectures": [spec.architecture]},
        **{**spec.engine_args, "skip_tokenizer_init": True},
    )
    return args.create_engine_config(), spec


@pytest.mark.parametrize(("stage", "model_cls"), [("thinker", Qwen2_5OmniThinker), ("talker", Qwen2_5OmniTalker)])
def test_language_models_load_all_their_tensors(
    checkpoint: tuple[Path, dict[str, Any]], stage: str, model_cls: Any
) -> None:
    path, tensors = checkpoint
    config, _ = make_config(path, stage)
    with set_current_vllm_config(config), on_meta_device():
        model = model_cls(vllm_config=config)
        parameters = {name for name, _ in model.named_parameters()}
        loaded = model.load_weights(iter(tensors.items()))
    assert parameters - loaded == set()


def test_the_vocoder_loads_all_its_tensors(checkpoint: tuple[Path, dict[str, Any]]) -> None:
    path, tensors = checkpoint
    config, _ = make_config(path, "token2wav")
    with torch.device("meta"):
        model = Qwen2_5OmniToken2Wav(vllm_config=config)
    loaded = model.load_weights(iter(tensors.items()))
    assert loaded == {name for name in tensors if name.startswith("token2wav.")}
