"""Which nodes of a cluster run which engines, and what is asked of the nodes; no Ray, no engine."""

from pathlib import Path
from typing import Any

import pytest

from vllm_omni.config import OmniConfig, load_config
from vllm_omni.deploy.cluster import NotYet, Share, spread
from vllm_omni.deploy.ray_messages import Node
from vllm_omni.errors import ConfigError

GIB = 1 << 30


def cards(name: str, number: int, free: int | None = None) -> Node:
    left = number if free is None else free
    return Node(f"id-{name}", name, f"10.0.0.{len(name)}", f"{name}.local", number > 0, left, 8.0, 64 * GIB)


def cpu(name: str, num_cpus: float = 8.0) -> Node:
    return Node(f"id-{name}", name, f"10.0.1.{len(name)}", f"{name}.local", False, 0, num_cpus, 64 * GIB)


def config(model: Path, *overrides: str, **more: Any) -> OmniConfig:
    return load_config(model, worker_backend="ray", stage_overrides=overrides, **more)


def shares(made: tuple[OmniConfig, list[Share]]) -> dict[str, tuple[tuple[str, ...], dict[str, float]]]:
    return {one.bundle.host: (one.engines, one.bundle.resources) for one in made[1]}


def test_stages_without_a_host_share_one_node_as_they_share_one_machine(tiny_checkpoint: Path) -> None:
    made = spread(config(tiny_checkpoint), [cpu("a"), cpu("b")])
    assert shares(made) == {"a": (("thinker", "talker", "token2wav"), {"CPU": 3.0})}
    assert {stage.host for stage in made[0].stages} == {"a"}
    assert [one.is_chosen for one in made[1]] == [True]


@pytest.mark.parametrize("name", ["bb", "10.0.1.2", "bb.local", "id-bb"])
def test_a_host_is_the_name_the_address_or_the_id_of_a_node(tiny_checkpoint: Path, name: str) -> None:
    made = spread(config(tiny_checkpoint, f"talker.host={name}"), [cpu("a"), cpu("bb")])
    assert shares(made) == {"bb": (("talker",), {"CPU": 1.0}), "a": (("thinker", "token2wav"), {"CPU": 2.0})}
    assert made[0].stage("talker").host == "bb"
    assert [one.is_chosen for one in made[1]] == [False, True]


def test_cards_are_reserved_once_for_the_stages_that_share_them(tiny_checkpoint: Path) -> None:
    made = spread(config(tiny_checkpoint, "thinker.tensor_parallel_size=2"), [cards("a", 1), cards("bb", 4)])
    assert shares(made) == {"bb": (("thinker", "talker", "token2wav"), {"GPU": 2.0})}


def test_replicas_spread_over_nodes_and_each_has_its_host(tiny_checkpoint: Path) -> None:
    made = spread(config(tiny_checkpoint, "thinker.replicas=2"), [cards("a", 1), cards("bb", 1)])
    assert made[0].stage("thinker").host == ["a", "bb"]
    assert {host: resources for host, (_, resources) in shares(made).items()} == {"a": {"GPU": 1.0}, "bb": {"GPU": 1.0}}


def test_a_named_host_takes_cards_from_what_is_chosen(tiny_checkpoint: Path) -> None:
    made = spread(config(tiny_checkpoint, "talker.host=a"), [cards("a", 1), cards("bb", 1)])
    assert {host: engines for host, (engines, _) in shares(made).items()} == {
        "a": ("talker",),
        "bb": ("thinker", "token2wav"),
    }


def test_what_other_jobs_use_is_not_free(tiny_checkpoint: Path) -> None:
    with pytest.raises(NotYet, match=r"no card or CPU is free on a, bb"):
        spread(config(tiny_checkpoint), [cards("a", 2, free=0), cpu("bb", num_cpus=0.0)])


def test_too_few_cards_say_what_is_short(tiny_checkpoint: Path) -> None:
    with pytest.raises(NotYet, match=r"thinker.*4.*cards"):
        spread(config(tiny_checkpoint, "thinker.tensor_parallel_size=4"), [cards("a", 2)])


def test_an_unknown_node_is_rejected_with_the_nearest_name(tiny_checkpoint: Path) -> None:
    with pytest.raises(ConfigError, match=r"engine 'talker': host = 'box-c': the cluster has no such node: did you"):
        spread(config(tiny_checkpoint, "talker.host=box-c"), [cpu("box-a")])


def test_a_name_of_two_nodes_is_rejected_with_their_ids(tiny_checkpoint: Path) -> None:
    twice = [cpu("a"), Node("id-other", "a", "10.9.9.9", "x", False, 0, 1.0, GIB)]
    with pytest.raises(ConfigError, match=r"2 nodes have this name; give an id: id-a, id-other"):
        spread(config(tiny_checkpoint, "talker.host=a"), twice)


def test_what_cannot_be_on_another_host_is_rejected(tiny_checkpoint: Path) -> None:
    with pytest.raises(ConfigError, match=r"worker_backend = 'ray': each stage has a host: .*cannot be combined with"):
        spread(config(tiny_checkpoint, "thinker.data_parallel_size=2"), [cpu("a")])
    with pytest.raises(ConfigError, match=r"worker_backend = 'ray': stage 'thinker': nodes = 2: .*by hand"):
        spread(config(tiny_checkpoint, "thinker.nodes=2"), [cpu("a")])


def test_replicas_that_start_later_are_rejected(tiny_checkpoint: Path) -> None:
    with pytest.raises(ConfigError, match=r"worker_backend = 'ray': stage 'talker': max_replicas: .*: give replicas"):
        spread(config(tiny_checkpoint, "talker.max_replicas=2"), [cpu("a")])


def test_instances_spread_over_nodes_as_replicas_do(tiny_checkpoint: Path) -> None:
    made = spread(config(tiny_checkpoint, epd="E:1,P:1,D:1"), [cards("a", 1), cards("bb", 2)])
    assert sorted(made[0].stage("thinker").host) == ["a", "bb", "bb"]
    where = "thinker.host=[a, bb, bb]"
    named = spread(config(tiny_checkpoint, where, epd="E:1,P:1,D:1"), [cards("a", 1), cards("bb", 3)])
    assert named[0].stage("thinker").host == ["a", "bb", "bb"]
    by_host = {host: engines for host, (engines, _) in shares(named).items()}
    assert by_host["a"][0] == "thinker/E0"
    assert by_host["bb"][:2] == ("thinker/P0", "thinker/D0")


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"worker_backend": "rey"}, r"worker_backend = 'rey': did you mean 'ray'\?"),
        ({"ray_address": "10.0.0.1:6379"}, r"ray_address: has no effect without worker_backend = 'ray'"),
        ({"worker_backend": "ray", "ray_address": "ray://a:10001"}, r"is one of Ray Client's: give HOST:PORT"),
    ],
)
def test_wrong_settings_of_workers_are_rejected(tiny_checkpoint: Path, more: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        load_config(tiny_checkpoint, **more)
