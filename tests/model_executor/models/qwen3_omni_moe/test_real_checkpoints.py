"""The published checkpoints load by their real names: every tensor of transformers' classes at its real shape is read.

Nothing is allocated: the key lists come from transformers' classes on the meta device, where our models are, too. They
are those that transformers writes, with a tensor for each expert, as in the published files.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import Qwen3OmniMoeConfig, Qwen3OmniMoeForConditionalGeneration
from transformers.core_model_loading import revert_weight_conversion
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import cleanup_dist_env_and_memory, init_distributed_environment, initialize_model_parallel
from vllm.engine.arg_utils import EngineArgs

from tests.meta_models import on_meta_device
from vllm_omni.config import read_model_type
from vllm_omni.model_executor.models.qwen3_omni_moe.code2wav import Qwen3OmniCode2Wav
from vllm_omni.model_executor.models.qwen3_omni_moe.talker import THINKER_EMBEDDING, Qwen3OmniTalker
from vllm_omni.model_executor.models.qwen3_omni_moe.thinker import Qwen3OmniThinker
from vllm_omni.model_executor.pipeline import find_pipeline_cls
from vllm_omni.plugin import register

ROPE = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [24, 20, 20], "interleaved": True}
MEDIA = {
    "audio_token_id": 151675,
    "image_token_id": 151655,
    "video_token_id": 151656,
    "audio_start_token_id": 151669,
    "audio_end_token_id": 151670,
    "vision_start_token_id": 151652,
    "position_id_per_seconds": 13,
    "seconds_per_chunk": 2,
}
# Of Qwen3-Omni-30B-A3B, where its published config.json differs from the defaults of transformers' classes.
TEXT = {
    "vocab_size": 152064,
    "hidden_size": 2048,
    "intermediate_size": 768,
    "moe_intermediate_size": 768,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "rope_parameters": ROPE,
    "tie_word_embeddings": False,
}
TALKER_TEXT = {
    "vocab_size": 3072,
    "hidden_size": 1024,
    "intermediate_size": 2048,
    "moe_intermediate_size": 384,
    "shared_expert_intermediate_size": 768,
    "num_hidden_layers": 20,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 6,
    "norm_topk_prob": True,
    "rope_parameters": ROPE,
}
TALKER = {
    "accept_hidden_layer": 24,
    "num_code_groups": 16,
    "thinker_hidden_size": 2048,
    "spatial_merge_size": 2,
    "text_config": TALKER_TEXT,
    "code_predictor_config": {"num_code_groups": 16, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
    "codec_pad_id": 2148,
    "codec_bos_id": 2149,
    "codec_eos_token_id": 2150,
    "codec_nothink_id": 2155,
    "codec_think_bos_id": 2156,
    "codec_think_eos_id": 2157,
    "speaker_id": {"chelsie": 2301, "ethan": 2302, "aiden": 2303},
    **MEDIA,
}
# Captioner has Thinking's configuration.
STAGES: dict[str, dict[str, Any]] = {
    "Instruct": {"thinker": Qwen3OmniThinker, "talker": Qwen3OmniTalker, "code2wav": Qwen3OmniCode2Wav},
    "Thinking": {"thinker": Qwen3OmniThinker},
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


class ReadTensors(TorchDispatchMode):
    """The storages whose content is copied, views of them included."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.copy_.default, torch.ops.aten._to_copy.default, torch.ops.aten.index.Tensor):
            source = args[1] if func is torch.ops.aten.copy_.default else args[0]
            self.storages |= {one.untyped_storage()._cdata for one in tree_leaves(source)}
        return func(*args, **(kwargs or {}))


def write_config(path: Path, variant: str) -> Qwen3OmniMoeConfig:
    config = Qwen3OmniMoeConfig(
        thinker_config={
            "text_config": TEXT,
            "vision_config": {"out_hidden_size": 2048, "image_size": 768, "apply_vit_abs_pos_embed": True},
            "audio_config": {"output_dim": 2048},
            **MEDIA,
        },
        talker_config=TALKER,
        enable_audio_output=variant == "Instruct",
        architectures=["Qwen3OmniMoeForConditionalGeneration"],
    )
    config.save_pretrained(path)
    return config


def published_tensors(config: Qwen3OmniMoeConfig) -> dict[str, torch.Tensor]:
    with torch.device("meta"):
        model = Qwen3OmniMoeForConditionalGeneration._from_config(config)
        written = revert_weight_conversion(model, dict(model.state_dict()))
        # A storage for each tensor: those of experts are views of one.
        return {name: torch.empty_like(tensor) for name, tensor in written.items()}


@pytest.mark.long
@pytest.mark.parametrize("variant", STAGES)
def test_every_tensor_is_read_and_every_parameter_loaded(variant: str, tmp_path: Path) -> None:
    config = write_config(tmp_path, variant)
    tensors = published_tensors(config)
    assert "thinker.model.layers.47.mlp.experts.127.down_proj.weight" in tensors
    assert tensors["thinker.model.layers.0.mlp.experts.0.gate_proj.weight"].shape == (768, 2048)
    pipeline = find_pipeline_cls(read_model_type(tmp_path))(str(tmp_path), config)
    assert [spec.name for spec in pipeline.stages] == list(STAGES[variant])
    unread = dict(tensors)
    assert len({tensor.untyped_storage()._cdata for tensor in tensors.values()}) == len(tensors)
    for spec in pipeline.stages:
        args: dict[str, Any] = {**spec.engine_args, "skip_tokenizer_init": True}
        overrides = spec.hf_overrides or {"architectures": [spec.architecture]}
        engine = EngineArgs(model=str(tmp_path), max_model_len=2048, dtype="bfloat16", hf_overrides=overrides, **args)
        made = engine.create_engine_config()
        with set_current_vllm_config(made), on_meta_device():
            model = STAGES[variant][spec.name](vllm_config=made)
            with ReadTensors() as read:
                loaded = model.load_weights(iter(tensors.items()))
        if spec.name != "code2wav":  # its decoder is transformers' own module, loaded strictly
            assert {name for name, _ in model.named_parameters()} - loaded == set()
        if spec.name == "talker":
            assert tensors[THINKER_EMBEDDING].untyped_storage()._cdata in read.storages
        prefix = f"{spec.name}."
        for name, tensor in tensors.items():
            if name.startswith(prefix) and (name in loaded or tensor.untyped_storage()._cdata in read.storages):
                unread.pop(name, None)
    assert sorted(unread) == []
