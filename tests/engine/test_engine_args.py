"""Which of vLLM's engine arguments a stage takes, before an engine starts."""

import copy
import re
from collections.abc import Mapping
from typing import Any, get_args

import pytest
from transformers import PreTrainedConfig
from vllm.config import VllmConfig
from vllm.config.offload import UVAOffloadConfig
from vllm.config.weight_transfer import WeightTransferConfig
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from tests.text_model import make_config
from vllm_omni.config import StageConfig
from vllm_omni.config.lacking_args import LACKING_ARGS
from vllm_omni.config.model import EngineType
from vllm_omni.config.vllm_args import known_engine_args
from vllm_omni.engine.engine_args import _keeps_rows, choose_attention, create_vllm_config, unshareable
from vllm_omni.errors import ConfigError
from vllm_omni.messages.canvas_step import DENOISES
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


@pytest.mark.parametrize(
    ("part", "changes", "message"),
    [
        ("device_config", {"device_type": "xpu"}, "it is for CPUs and for NVIDIA's GPUs, and this is 'xpu'"),
        ("model_config", {"quantization": "fp8"}, "weights with quantization = 'fp8' are packed in each process"),
        ("model_config", {"enable_sleep_mode": True}, "enable_sleep_mode frees weights, and these belong to no engine"),
        ("model_config", {}, None),
    ],
    ids=str,
)
def test_engines_that_cannot_share_weights(part: str, changes: dict[str, Any], message: str | None) -> None:
    config = make_config(num_layers=1, num_heads=1, head_size=32, vocab_size=32, block_size=16)
    changed = copy.copy(getattr(config, part))
    for name, value in changes.items():
        setattr(changed, name, value)
    setattr(config, part, changed)
    reason = unshareable(config)
    assert reason is None if message is None else re.fullmatch(message, reason or "")


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize(
    ("part", "changes", "message"),
    [
        ("parallel_config", {"enable_eplb": True}, "enable_eplb moves weights while an engine runs, .*"),
        ("offload_config", {"uva": UVAOffloadConfig(cpu_offload_gb=1)}, r"offloading \(cpu_offload_gb, .*\) moves .*"),
        (None, {"weight_transfer_config": WeightTransferConfig()}, "weight_transfer_config replaces weights .*"),
        (None, {}, None),
    ],
    ids=str,
)
def test_engines_of_a_gpu_cannot_share_weights_that_change(
    part: str | None, changes: dict[str, Any], message: str | None, device: str
) -> None:
    """On a CPU the changes are one engine's own."""
    config = make_config(num_layers=1, num_heads=1, head_size=32, vocab_size=32, block_size=16)
    config.device_config = copy.copy(config.device_config)
    config.device_config.device_type = device
    changed = config if part is None else copy.copy(getattr(config, part))
    for name, value in changes.items():
        setattr(changed, name, value)
    if part is not None:
        setattr(config, part, changed)
    reason = unshareable(config)
    assert reason is None if message is None or device == "cpu" else re.fullmatch(message, reason or "")


@pytest.mark.parametrize(
    ("device", "sees_images", "given", "chosen"),
    [
        ("cuda", True, {}, "TRITON_ATTN"),
        ("cuda", True, {"flash_attn_version": 4}, "FLASH_ATTN"),
        ("cuda", True, {"backend": AttentionBackendEnum.TRITON_ATTN}, "TRITON_ATTN"),
        ("cuda", True, {"backend": AttentionBackendEnum.FLASH_ATTN, "flash_attn_version": 4}, "FLASH_ATTN"),
        ("cuda", False, {}, None),
        ("cpu", True, {}, None),
    ],
    ids=str,
)
def test_images_that_see_each_other_get_attention_with_a_flag_for_each_row(
    device: str, sees_images: bool, given: dict[str, Any], chosen: str | None
) -> None:
    config = on_device(device, sees_images, **given)
    choose_attention(config)
    backend = config.attention_config.backend
    assert (backend and backend.name) == chosen


@pytest.mark.parametrize("given", [{}, {"flash_attn_version": 3}], ids=str)
def test_attention_without_such_flags_is_rejected_for_them(given: dict[str, Any]) -> None:
    config = on_device("cuda", True, backend=AttentionBackendEnum.FLASH_ATTN, **given)
    with pytest.raises(ConfigError, match=r"attention_backend = 'FLASH_ATTN': .* leave it out, give 'TRITON_ATTN'"):
        choose_attention(config)
    choose_attention(on_device("cuda", False, backend=AttentionBackendEnum.FLASH_ATTN, **given))


def on_device(device: str, sees_images: bool, **attention: Any) -> VllmConfig:
    config = make_config(num_layers=1, num_heads=1, head_size=32, vocab_size=32, block_size=16)
    for part in ("device_config", "model_config", "attention_config"):
        setattr(config, part, copy.copy(getattr(config, part)))
    config.device_config.device_type = device
    config.model_config.hf_config = PreTrainedConfig(**{DENOISES: sees_images})
    for name, value in attention.items():
        setattr(config.attention_config, name, value)
    return config


def test_a_stage_keeps_the_rows_that_are_read_and_rejects_a_setting_without_effect() -> None:
    read = StageSpec("s", architecture="A", output_type="latents", publishing_fields=frozenset({"rows"}))
    unread = StageSpec("s", architecture="A", output_type="text")
    pictures = StageSpec("s", "A", "latents", publishing_fields=frozenset({"latents"}), publishes_pictures=True)

    def keeps(spec: StageSpec, *, is_instance: bool = False, **given: Any) -> bool:
        config = StageConfig(stage_id=0, name="s", model="/nowhere", **given)
        return _keeps_rows(config, spec, {**config.engine_args}, is_instance=is_instance)

    connector = {"engine_args": {"kv_transfer_config": {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}}}
    assert keeps(read) and keeps(read, row_cache=True) and keeps(read, is_instance=True, **connector)
    assert not any(keeps(spec) for spec in (unread, pictures))
    assert not keeps(read, row_cache=False)
    assert not keeps(read, engine_args={"enable_prefix_caching": False})
    assert not keeps(read, engine_args={"mm_encoder_only": True})
    assert not keeps(read, **connector)
    for spec in (unread, pictures):
        with pytest.raises(ConfigError, match="row_cache = True: no stage reads rows"):
            keeps(spec, row_cache=True)
