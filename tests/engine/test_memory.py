"""What stages declare that they need, compared with the models and caches that vLLM would make of them."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import cleanup_dist_env_and_memory, init_distributed_environment, initialize_model_parallel
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.platforms import interface
from vllm.utils.torch_utils import set_default_torch_dtype
from vllm.v1.executor.abstract import Executor

from tests.meta_models import on_meta_device
from vllm_omni.config import MODEL_INDEX, load_config
from vllm_omni.diffusion.loading import load_diffusers_pipeline
from vllm_omni.diffusion.pipeline_copy import networks_of
from vllm_omni.engine.memory import declared_memory, devices_of, memory_sections
from vllm_omni.engine.orchestrator import Orchestrator
from vllm_omni.engine.stage import StageEngine
from vllm_omni.errors import ConfigError
from vllm_omni.model_executor.rank_memory import cache_bounds, parameter_bytes
from vllm_omni.process.memory import StageMemory
from vllm_omni.testing import llava
from vllm_omni.worker.platforms import PLATFORMS, Platform

GIB = 1 << 30
FLAGS: dict[str, Any] = {"max_model_len": 512, "enforce_eager": True}


@pytest.fixture(autouse=True)
def no_cache_by_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE", raising=False)


@pytest.fixture(scope="module")
def llava_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return llava.build(tmp_path_factory.mktemp("llava"))


def make_engines(model: Path, *stage_overrides: str, **flags: Any) -> dict[str, StageEngine]:
    flags = flags if (model / MODEL_INDEX).exists() else {**FLAGS, **flags}
    orchestrator = Orchestrator(load_config(model, stage_overrides=stage_overrides, **flags))
    return {
        engine.name: engine for stage in orchestrator.config.stages for engine in orchestrator.maker.make_node(stage)[0]
    }


def declared(engine: StageEngine) -> StageMemory:
    return declared_memory(engine, engine.name, 24 * GIB)


@pytest.fixture(scope="module")
def one_process_group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """vLLM's parallel layers ask for a group, also where it has one member."""
    init_method = f"file://{tmp_path_factory.mktemp('group')}/rendezvous"
    with set_current_vllm_config(VllmConfig()):
        init_distributed_environment(1, 0, init_method, 0, "gloo")
        initialize_model_parallel(1, 1)
    yield
    cleanup_dist_env_and_memory()


def make_model(config: VllmConfig) -> torch.nn.Module:
    """The model of a stage as vLLM makes it, without memory."""
    dtype = set_default_torch_dtype(config.model_config.dtype)
    with set_current_vllm_config(config), on_meta_device(), torch.no_grad(), dtype:
        return initialize_model(config)


def real_needs(config: VllmConfig, model: torch.nn.Module) -> tuple[int, int, int]:
    """Bytes of the parameters, and the bounds of the cache by the model's own layers."""
    layers = config.compilation_config.static_forward_context
    specs = {
        name: spec
        for name, layer in layers.items()
        if isinstance(layer, AttentionLayerBase) and (spec := layer.get_kv_cache_spec(config)) is not None
    }
    return sum(one.nbytes for one in model.parameters()), *cache_bounds(config, specs)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_stages_of_qwen_declare_what_their_models_have(
    tiny_checkpoint: Path, one_process_group: None, dtype: str
) -> None:
    engines = make_engines(tiny_checkpoint, "talker.max_num_seqs=7", dtype=dtype)
    for name in ("thinker", "talker"):
        config = engines[name].vllm_config
        needs = declared(engines[name])
        assert (needs.weights, needs.cache_min, needs.cache_max) == real_needs(config, make_model(config)), name
    vocoder = make_model(engines["token2wav"].vllm_config)
    assert declared(engines["token2wav"]).weights == sum(one.nbytes for one in vocoder.parameters())
    assert declared(engines["token2wav"]).cache_max == 0


def test_a_language_model_declares_also_the_tensors_that_it_skips(
    llava_checkpoint: Path, one_process_group: None
) -> None:
    engine = make_engines(llava_checkpoint, dtype="float32")["language"]
    model = make_model(engine.vllm_config)
    weights, smallest, largest = real_needs(engine.vllm_config, model)
    needs = declared(engine)
    layer = next(one for name, one in model.named_modules() if name.endswith("encoder.layers.0"))
    norm = next(one for name, one in model.named_modules() if name.endswith("pre_layrnorm"))
    skipped = sum(one.nbytes for skips in (layer, norm) for one in skips.parameters())  # the tower's last layer
    assert (needs.weights, needs.cache_min, needs.cache_max) == (weights + skipped, smallest, largest)


@pytest.mark.parametrize("name", ["qwen-image", "wan2.2-t2v", "stable-audio"])
def test_a_pipeline_declares_the_parameters_of_its_networks(tiny_pipeline: Any, name: str) -> None:
    path = tiny_pipeline(name)
    (engine,) = make_engines(path).values()
    networks = networks_of(load_diffusers_pipeline(str(path))).values()
    assert declared(engine).weights == parameter_bytes(networks)


def test_ranks_divide_weights_and_caches(tiny_checkpoint: Path) -> None:
    one = declared(make_engines(tiny_checkpoint)["talker"])
    two = declared(make_engines(tiny_checkpoint, tensor_parallel_size=2)["talker"])
    assert (two.weights, two.cache_min) == (one.weights // 2, one.cache_min // 2)


def test_instances_declare_what_each_loads(llava_checkpoint: Path) -> None:
    whole = declared(make_engines(llava_checkpoint)["language"])
    engines = make_engines(llava_checkpoint, epd="E:1,PD:1")
    encoder, rest = declared(engines["language/E0"]), declared(engines["language/PD0"])
    assert 0 < encoder.weights < whole.weights == rest.weights
    assert encoder.cache_max == 0 < rest.cache_max == whole.cache_max


# -- which stages divide a device


class Gpus(interface.Platform):
    device_control_env_var = "CUDA_VISIBLE_DEVICES"


@pytest.mark.parametrize(
    ("visible", "device_ids", "devices"),
    [("", None, ["cuda:0", "cuda:1"]), ("3,5", None, ["cuda:3", "cuda:5"]), ("", [4, 2], ["cuda:4", "cuda:2"])],
)
def test_gpus_are_named_by_their_number_on_the_host(
    tiny_checkpoint: Path,
    monkeypatch: pytest.MonkeyPatch,
    visible: str,
    device_ids: list[int] | None,
    devices: list[str],
) -> None:
    """The configuration of a machine without GPUs, with their names put into it."""
    config = make_engines(tiny_checkpoint, tensor_parallel_size=2)["talker"].vllm_config
    monkeypatch.setattr(config.device_config, "device_type", "cuda")
    monkeypatch.setattr(config.parallel_config, "assigned_physical_gpu_ids", device_ids)
    monkeypatch.setattr("vllm_omni.engine.memory.current_platform", Gpus)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert devices_of(config) == devices


def test_all_stages_on_a_device_divide_it(tiny_checkpoint: Path) -> None:
    sections = memory_sections(make_engines(tiny_checkpoint, "talker.gpu_memory_utilization=0.25").values())
    assert {section.ranks["cpu"] == ["thinker", "talker", "token2wav"] for section in sections.values()} == {True}
    assert {name: section.memory_share for name, section in sections.items()} == {
        "thinker": None,
        "talker": 0.25,
        "token2wav": None,
    }


def test_ranks_of_one_stage_are_named(tiny_checkpoint: Path) -> None:
    sections = memory_sections(make_engines(tiny_checkpoint, "talker.tensor_parallel_size=2").values())
    assert sections["talker"].devices == ["cpu", "cpu"]
    assert sections["thinker"].ranks == {"cpu": ["thinker", "talker rank 0", "talker rank 1", "token2wav"]}


def test_stages_whose_caches_are_all_configured_do_not_wait_for_one_another(
    tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks = [f"{name}.num_gpu_blocks_override=64" for name in ("thinker", "talker")]
    assert not memory_sections(make_engines(tiny_checkpoint, *blocks).values())
    sizes = [f"{name}.kv_cache_memory_bytes=1048576" for name in ("thinker", "talker")]
    assert not memory_sections(make_engines(tiny_checkpoint, *sizes).values())
    assert memory_sections(make_engines(tiny_checkpoint, *sizes[1:]).values())
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    engines = make_engines(tiny_checkpoint)
    assert not memory_sections(engines.values())
    assert declared(engines["talker"]).cache == GIB
    of_its_own = make_engines(tiny_checkpoint, sizes[1])["talker"]
    assert declared(of_its_own).cache == 1048576, "a stage's own size wins over the environment's"


def test_configured_caches_that_are_larger_than_the_host_are_rejected(
    tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    engines = make_engines(tiny_checkpoint, f"thinker.kv_cache_memory_bytes={1 << 50}")
    with pytest.raises(ConfigError, match=r"1048576.0 GiB of them for thinker, and this host has"):
        memory_sections(engines.values())


def test_on_a_gpu_they_do_as_vllm_would_measure_the_whole_device(
    tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks = [f"{name}.num_gpu_blocks_override=64" for name in ("thinker", "talker")]
    engines = make_engines(tiny_checkpoint, *blocks)
    for engine in engines.values():
        monkeypatch.setattr(engine.vllm_config.device_config, "device_type", "cuda")
    monkeypatch.setattr("vllm_omni.engine.memory.current_platform", Gpus)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    sections = memory_sections(engines.values())
    assert [section.ranks for section in sections.values()] == 3 * [{"cuda:0": ["thinker", "talker", "token2wav"]}]


class OthersExecutor(Executor):
    """Of another package, which reports nothing."""


def test_an_executor_of_another_package_is_not_waited_for(tiny_checkpoint: Path) -> None:
    config = load_config(tiny_checkpoint, **FLAGS)
    stages = [*config.stages[:-1], dataclasses.replace(config.stages[-1], executor_class=OthersExecutor)]
    orchestrator = Orchestrator(dataclasses.replace(config, stages=tuple(stages)))
    engines = [engine for stage in stages for engine in orchestrator.maker.make_node(stage)[0]]
    sections = memory_sections(engines)
    assert sections.keys() == {"thinker", "talker"}
    assert sections["talker"].ranks == {"cpu": ["thinker", "talker"]}


def test_workers_of_another_platform_divide_only_what_they_say(
    tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engines = make_engines(tiny_checkpoint)
    monkeypatch.setitem(PLATFORMS, "cpu", Platform(PLATFORMS["cpu"].ar_worker))
    assert not memory_sections(engines.values())


# -- what a checkpoint has


def test_a_checkpoint_without_safetensors_cannot_be_planned(tiny_checkpoint: Path, tmp_path: Path) -> None:
    for file in tiny_checkpoint.iterdir():
        if file.suffix != ".safetensors":
            (tmp_path / file.name).write_bytes(file.read_bytes())
    with pytest.raises(ConfigError, match=r"stage 'thinker': .* has no safetensors, whose sizes could be read"):
        declared(make_engines(tmp_path)["thinker"])


def test_a_quantized_checkpoint_is_counted_as_it_is_stored(tiny_checkpoint: Path) -> None:
    engine = make_engines(tiny_checkpoint, dtype="bfloat16")["talker"]
    as_stored = declared(engine)
    model_config = engine.vllm_config.model_config
    model_config.quantization = "fp8"
    assert declared(engine).weights == 2 * as_stored.weights  # float32 in the file
