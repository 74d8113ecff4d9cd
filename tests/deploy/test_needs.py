"""What a deployment asks of devices, and what it gets on one host."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from vllm_omni.config import OmniConfig, load_config
from vllm_omni.config.travel import on_host
from vllm_omni.deploy.needs import list_engines, place_here, stages_of
from vllm_omni.deploy.placement import plan
from vllm_omni.deploy.resources import Host, Place, Stage
from vllm_omni.deploy.shortage import NoPlace
from vllm_omni.engine.orchestrator import Orchestrator
from vllm_omni.entrypoints.async_omni import AsyncOmni
from vllm_omni.errors import ConfigError
from vllm_omni.process.memory import Device
from vllm_omni.testing import llava

GIB = 1 << 30
FLAGS: dict[str, Any] = {"max_model_len": 512, "enforce_eager": True, "dtype": "float32"}


@pytest.fixture(autouse=True)
def no_cache_by_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE", raising=False)


@pytest.fixture(scope="module")
def llava_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return llava.build(tmp_path_factory.mktemp("llava"))


def config_of(model: Path, *stage_overrides: str, **flags: Any) -> OmniConfig:
    return load_config(model, stage_overrides=stage_overrides, **{**FLAGS, **flags})


def with_memory(config: OmniConfig) -> dict[str, Stage]:
    return {one.name: one for one in stages_of(config, Orchestrator(config))}


def cards(number: int, gib: int = 80) -> Host:
    return Host("here", tuple(Device(name=f"cuda:{i}", total=gib * GIB, free=gib * GIB) for i in range(number)))


def cpu(gib: float) -> Host:
    size = int(gib * GIB)
    return Host("here", (Device(name="cpu", total=size, free=size, is_host=True),), has_cards=False)


def device_ids(config: OmniConfig) -> dict[str, Any]:
    return {one.name: one.args.get("device_ids") for one in list_engines(config)}


# -- stages ------------------------------------------------------------------------------------------------------------


def test_the_first_stage_owns_devices_and_the_others_share_them(tiny_checkpoint: Path) -> None:
    stages = stages_of(config_of(tiny_checkpoint, "talker.replicas=2", "thinker.tensor_parallel_size=2"))
    assert [(one.name, one.replicas, one.ranks, one.layer, one.may_share) for one in stages] == [
        ("thinker", 1, 2, 0, True),
        ("talker", 2, 1, 1, True),
        ("token2wav", 1, 1, 1, True),
    ]
    assert [one.names for one in stages] == [("thinker",), ("talker/0", "talker/1"), ("token2wav",)]


def test_a_layer_of_the_deployment_is_kept(tiny_checkpoint: Path) -> None:
    stages = stages_of(config_of(tiny_checkpoint, "talker.layer=0", "token2wav.layer=2", "thinker.nodes=2"))
    assert [(one.layer, one.may_share, one.nodes) for one in stages] == [(0, True, 2), (0, False, 1), (2, False, 1)]


def test_stages_that_exchange_rows_are_near(tiny_checkpoint: Path) -> None:
    stages = with_memory(config_of(tiny_checkpoint))
    assert {name: set(one.near) for name, one in stages.items()} == {
        "thinker": {"talker"},
        "talker": {"thinker"},
        "token2wav": set(),
    }


def test_instances_of_each_kind_are_a_stage_and_near_each_other(llava_checkpoint: Path) -> None:
    stages = with_memory(config_of(llava_checkpoint, epd="E:1,PD:2"))
    encoder, rest = stages["language/E"], stages["language/PD"]
    assert (encoder.names, rest.names) == (("language/E0",), ("language/PD0", "language/PD1"))
    assert (encoder.near, rest.near) == ({"language/PD"}, {"language/E"})
    assert encoder.memory is not None
    assert rest.memory is not None
    assert 0 < encoder.memory.weights < rest.memory.weights
    assert encoder.memory.cache_max == 0 < rest.memory.cache_max


def test_an_instance_that_is_unlike_its_kind_is_a_stage_of_its_own(llava_checkpoint: Path) -> None:
    args = {"instances": {"EPD": 3}, "engine_args": {"EPD1": {"tensor_parallel_size": 2}}}
    stages = stages_of(config_of(llava_checkpoint, epd=args))
    assert [(one.name, one.names, one.ranks) for one in stages] == [
        ("language/EPD", ("language/EPD0", "language/EPD2"), 1),
        ("language/EPD1", ("language/EPD1",), 2),
    ]
    assert [one.name for one in plan(stages, [cards(4)]).replicas] == [
        "language/EPD0",
        "language/EPD2",
        "language/EPD1",
    ]


def test_devices_that_a_deployment_names_are_kept(tiny_checkpoint: Path) -> None:
    config = config_of(tiny_checkpoint, "talker.replicas=2", "talker.device_ids=[2, 1]", "token2wav.device_ids=[2]")
    thinker, talker, vocoder = stages_of(config)
    assert (thinker.pinned, talker.pinned, vocoder.pinned) == ((), ((2,), (1,)), ((2,),))
    made = plan([thinker, talker, vocoder], [cards(3)])
    assert {one.name: (one.layer, one.places[0].device) for one in made.replicas} == {
        "thinker": (0, "cuda:0"),
        "talker/0": (0, "cuda:2"),
        "talker/1": (0, "cuda:1"),
        "token2wav": (1, "cuda:2"),
    }


def test_what_vllm_places_itself_is_not_planned(tiny_checkpoint: Path) -> None:
    config = config_of(
        tiny_checkpoint, "thinker.distributed_executor_backend=ray", 'talker.device_ids=["GPU-0a1b"]', "talker.nodes=1"
    )
    assert [one.name for one in list_engines(config) if one.is_left_to_vllm] == ["thinker", "talker"]
    assert [(one.name, one.layer) for one in stages_of(config)] == [("token2wav", 0)]


# -- memory ------------------------------------------------------------------------------------------------------------


def test_a_plan_honours_what_the_configuration_sizes(tiny_checkpoint: Path) -> None:
    sizes = "thinker.gpu_memory_utilization=0.25", "talker.kv_cache_memory_bytes=8388608"
    made = plan(list(with_memory(config_of(tiny_checkpoint, *sizes)).values()), [cards(1, gib=1)])
    divided = made.memory()[Place("here", "cuda:0")]
    thinker = next(stage for stage in divided.stages if stage.stage == "thinker")
    assert divided.caches == {"thinker": (1 << 28) - thinker.weights - thinker.activations, "talker": 8388608}


def test_ranks_count_each(tiny_checkpoint: Path) -> None:
    config = config_of(tiny_checkpoint, "thinker.tensor_parallel_size=2")
    (divided,) = plan(list(with_memory(config).values()), [cpu(1)]).memory().values()
    assert [one.stage for one in divided.stages] == ["talker", "thinker rank 0", "thinker rank 1", "token2wav"]


def test_weights_that_engines_share_count_once(llava_checkpoint: Path) -> None:
    config = config_of(llava_checkpoint, "language.replicas=3", "language.load_format=omni_shared")
    (divided,) = plan(list(with_memory(config).values()), [cpu(1)]).memory().values()
    first, *others = divided.stages
    assert first.weights > 0 == sum(one.weights for one in others)


# -- on this host ------------------------------------------------------------------------------------------------------


def test_on_one_device_a_deployment_stays_as_it_is(tiny_checkpoint: Path) -> None:
    config = config_of(tiny_checkpoint, "talker.replicas=2")
    assert place_here(config) is config
    assert place_here(config, cards(1)) is config


def test_of_several_cards_each_engine_gets_its_own_numbers(tiny_checkpoint: Path) -> None:
    config = config_of(
        tiny_checkpoint, "thinker.tensor_parallel_size=2", "talker.replicas=2", "talker.layer=0", "token2wav.layer=1"
    )
    assert device_ids(place_here(config, cards(4))) == {
        "thinker": [2, 3],
        "talker/0": [0],
        "talker/1": [1],
        "token2wav": [0],
    }


def test_a_replica_that_may_start_later_has_its_numbers_from_the_beginning(tiny_checkpoint: Path) -> None:
    config = config_of(tiny_checkpoint, "talker.max_replicas=2", "talker.layer=0")
    placed = device_ids(place_here(config, cards(3)))
    assert sorted((placed["talker/0"], placed["talker/1"])) == [[0], [1]]


def test_by_default_all_stages_are_on_the_first_card(tiny_checkpoint: Path) -> None:
    placed = place_here(config_of(tiny_checkpoint), cards(8))
    assert device_ids(placed) == {"thinker": [0], "talker": [0], "token2wav": [0]}
    assert place_here(placed, cards(8)) is placed  # all are named


def test_instances_get_numbers_in_their_own_arguments(llava_checkpoint: Path) -> None:
    args = {"instances": {"E": 1, "PD": 2}, "engine_args": {"PD1": {"max_num_seqs": 2}}}
    placed = place_here(config_of(llava_checkpoint, epd=args), cards(3))
    assert sorted(device_ids(placed).values()) == [[0], [1], [2]]
    assert placed.stages[0].deployment.engine_args["PD1"]["max_num_seqs"] == 2


def test_a_host_divides_its_cards_among_the_instances_that_it_serves(llava_checkpoint: Path) -> None:
    mix = {"instances": "E:1,P:1,D:1"}
    config = config_of(llava_checkpoint, "language.host=[box-a, box-b, box-b]", epd=mix)
    there = place_here(on_host(config, ["language/P0", "language/D0"]), cards(2))
    assert device_ids(there) == {"language/P0": [0], "language/D0": [1]}


def test_estimates_of_memory_reject_no_start(
    tiny_checkpoint: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny = Host("here", tuple(Device(name=f"cuda:{number}", total=1 << 20, free=1 << 20) for number in range(2)))
    config = config_of(tiny_checkpoint)
    with pytest.raises(NoPlace, match="of memory are missing"):
        plan(stages_of(config, Orchestrator(config)), [tiny])
    monkeypatch.setattr("logging.Logger.propagate", True, raising=False)
    assert device_ids(place_here(config, tiny)) == {"thinker": [0], "talker": [0], "token2wav": [0]}


@pytest.mark.parametrize(
    ("override", "make_host", "message"),
    [
        ("thinker.tensor_parallel_size=2", lambda: cards(1), "thinker finds no place: it needs 2 cards on one host"),
        (
            "thinker.nodes=2",
            lambda: cpu(1),
            "stage 'thinker': nodes = 2: its engine spans hosts that join this one: give",
        ),
        ("talker.device_ids=[4]", lambda: cards(2), r"talker finds no place: it needs a card \(device_ids 4\) in any"),
    ],
)
def test_what_this_host_lacks_is_reported_before_a_start(
    tiny_checkpoint: Path, override: str, make_host: Callable[[], Host], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        place_here(config_of(tiny_checkpoint, override), make_host())


def test_ranks_on_two_hosts_are_rejected_on_one(tiny_checkpoint: Path) -> None:
    config = config_of(tiny_checkpoint, "thinker.tensor_parallel_size=2", "thinker.nodes=2")
    with pytest.raises(
        ConfigError, match=r"'thinker': nodes = 2: its engine spans .*'thinker.host=\[NAME, ...\]' with 2"
    ):
        place_here(config)
    named = config_of(
        tiny_checkpoint, "thinker.tensor_parallel_size=4", "thinker.nodes=2", "thinker.host=[box-a, box-b]"
    )
    assert [one.name for one in list_engines(named)] == ["talker", "token2wav"]
    for part in named.stage("thinker").part_names:  # each host has half of the ranks
        assert device_ids(place_here(on_host(named, [part]), cards(2), has_parts=True)) == {"thinker": [0, 1]}


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("talker.layer=-1", "--stage talker.layer = -1: must be at least 0"),
        ("talker.layer=above", "--stage talker.layer = 'above': must be a whole number"),
        ("talker.nodes=0", "--stage talker.nodes = 0: must be at least 1"),
    ],
)
def test_wrong_settings_are_rejected(tiny_checkpoint: Path, override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config_of(tiny_checkpoint, override)


def test_a_ready_configuration_keeps_its_devices(tiny_checkpoint: Path) -> None:
    config = config_of(tiny_checkpoint)
    ready = Orchestrator(config).maker.make_node(config.stages[0])[0][0].vllm_config
    first = dataclasses.replace(config.stages[0], engine_args={}, vllm_config=ready)
    placed = place_here(dataclasses.replace(config, stages=(first, *config.stages[1:])), cards(2))
    assert placed.stages[0] is first


# -- served ------------------------------------------------------------------------------------------------------------


def test_a_server_rejects_what_this_host_lacks_before_an_engine_starts(tiny_checkpoint: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"'thinker': nodes = 2: its engine spans .*'thinker.host=\[NAME, ...\]' with 2"
    ):
        AsyncOmni(tiny_checkpoint, stage_overrides=["thinker.tensor_parallel_size=2", "thinker.nodes=2"], **FLAGS)


def test_engines_start_with_the_devices_of_the_plan(tiny_checkpoint: Path) -> None:
    placed = place_here(config_of(tiny_checkpoint, "talker.layer=0", "token2wav.replicas=2"), cards(2))
    orchestrator = Orchestrator(placed)
    engines = [engine for stage in placed.stages for engine in orchestrator.maker.make_node(stage)[0]]
    assert {one.name: one.vllm_config.parallel_config.assigned_physical_gpu_ids for one in engines} == {
        "thinker": [1],
        "talker": [0],
        "token2wav/0": [0],
        "token2wav/1": [1],
    }
