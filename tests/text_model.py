"""An engine's configuration without a checkpoint, for schedulers and connectors that are driven without a model."""

import copy
import json
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs

MAX_MODEL_LEN = 128


def make_config(*, num_layers: int, num_heads: int, head_size: int, vocab_size: int, block_size: int) -> VllmConfig:
    """Of a Llama of these sizes. The parts of the scheduler and the cache are the caller's own, to be changed."""
    config = copy.copy(_base_config(num_layers, num_heads, head_size, vocab_size, block_size))
    config.scheduler_config = copy.copy(config.scheduler_config)
    config.cache_config = copy.copy(config.cache_config)
    return config


@cache
def _base_config(num_layers: int, num_heads: int, head_size: int, vocab_size: int, block_size: int) -> VllmConfig:
    llama = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": num_heads * head_size,
        "intermediate_size": 8,
        "num_attention_heads": num_heads,
        "num_hidden_layers": num_layers,
        "num_key_value_heads": num_heads,
        "vocab_size": vocab_size,
        "max_position_embeddings": MAX_MODEL_LEN,
        "torch_dtype": "float32",
    }
    with TemporaryDirectory() as directory:
        (Path(directory) / "config.json").write_text(json.dumps(llama))
        return EngineArgs(
            model=directory,
            dtype="float32",
            skip_tokenizer_init=True,
            max_model_len=MAX_MODEL_LEN,
            max_num_batched_tokens=MAX_MODEL_LEN,
            block_size=block_size,
            async_scheduling=False,
        ).create_engine_config()
