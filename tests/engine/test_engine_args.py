"""Which of vLLM's engine arguments a stage takes, before an engine starts."""

from collections.abc import Mapping
from typing import Any, get_args

import pytest

from vllm_omni.config import StageConfig
from vllm_omni.config.lacking_args import LACKING_ARGS
from vllm_omni.config.model import EngineType
from vllm_omni.config.vllm_args import known_engine_args
from vllm_omni.engine.engine_args import create_vllm_config
from vllm_omni.errors import ConfigError
from vllm_omni.model_executor.pipeline import StageSpec

# Arguments with an effect on a stage without tokens: by the engine core, by its front end, or by our executors.
ON_ALL = set(
    "served_model_name trust_remote_code download_dir config_format dtype distributed_executor_backend numa_bind "
    "numa_bind_nodes numa_bind_cpus device_ids max_num_seqs max_num_queued_reqs disable_log_stats revision hf_token "
    "hf_overrides show_hidden_metrics_for_version otlp_traces_endpoint custom_histogram_buckets worker_cls "
    "enable_logging_iteration_details scheduler_cls profiler_config logging_config log_level log_config_file "
    "additional_config shutdown_timeout fail_on_environ_validation allowed_local_media_path "
    "allowed_media_domains".split()
)
ON = {
    "generation": ON_ALL
    | set(
        "load_format safetensors_load_strategy safetensors_prefetch_num_threads safetensors_prefetch_block_size "
        "model_loader_extra_config ignore_patterns use_tqdm_on_load pt_load_map_location hf_config_path "
        "model_class_overrides code_revision".split()
    ),
    "diffusion": ON_ALL | {"worker_extension_cls"},
}


@pytest.mark.parametrize("kind", ON)
def test_every_engine_argument_of_vllm_has_an_effect_on_a_stage_without_tokens_or_is_rejected(kind: str) -> None:
    lacking = set(LACKING_ARGS[kind])
    assert ON[kind] & lacking == set()
    assert (ON[kind] | lacking) == set(known_engine_args()), "decide about the new ones: tests/, lacking_args.py"


def test_every_kind_of_stage_has_a_table_of_known_arguments() -> None:
    assert set(LACKING_ARGS) == set(get_args(EngineType))
    for lacking in LACKING_ARGS.values():
        assert set(lacking) <= set(known_engine_args())


def configure(kind: Any, given: Mapping[str, Any], **spec: Any) -> None:
    """Read as far as the model, which does not exist."""
    config = StageConfig(stage_id=0, name="s", engine_type=kind, model="/nowhere", engine_args=dict(given))
    create_vllm_config(config, StageSpec("s", architecture="A", output_type="audio", **spec))


@pytest.mark.parametrize("kind", ON)
@pytest.mark.parametrize(
    ("given", "lacking"),
    [
        ({"tensor_parallel_size": 2}, "parallel ranks"),
        ({"pipeline_parallel_size": 2}, "parallel ranks"),
        ({"data_parallel_size": 2}, "parallel ranks"),
        ({"kv_cache_dtype": "fp8"}, "KV cache"),
        ({"enable_prefix_caching": True}, "KV cache"),
        ({"enforce_eager": False}, "compilation"),
        ({"seed": 3}, "random numbers of the engine's own"),
        ({"skip_tokenizer_init": False}, "tokenizer"),
        ({"max_num_batched_tokens": 4096}, "schedule of tokens"),
        ({"mm_processor_cache_gb": 0}, "media that vLLM processes"),
        ({"compilation_config": {"mode": 0}}, "compilation"),
    ],
    ids=str,
)
def test_an_argument_without_an_effect_is_rejected(kind: str, given: dict[str, Any], lacking: str) -> None:
    (name,) = given
    with pytest.raises(ConfigError, match=f"stage 's': {name} = .*: this kind of stage has no {lacking}; leave it out"):
        configure(kind, given)


@pytest.mark.parametrize("kind", ON)
@pytest.mark.parametrize(
    "given",
    [
        {"tensor_parallel_size": 1, "kv_cache_dtype": "auto", "seed": 0},
        {"enforce_eager": True, "skip_tokenizer_init": True, "max_model_len": 16},
        {"enable_prefix_caching": False, "compilation_config": {}, "quantization": None},
    ],
    ids=str,
)
def test_a_value_that_holds_anyway_is_not_rejected(kind: str, given: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="/nowhere"):
        configure(kind, given)


def test_a_value_that_the_model_sets_may_be_repeated() -> None:
    with pytest.raises(ConfigError, match="/nowhere"):
        configure("generation", {"max_model_len": 64}, engine_args={"max_model_len": 64})
