"""Which nodes of a cluster run which engines, and what is asked of the nodes; no Ray, no engine."""

from pathlib import Path
from typing import Any

import pytest

from vllm_omni.config import OmniConfig, load_config
from vllm_omni.deploy.cluster import NotYet, Share, move, spread
from vllm_omni.deploy.ray_messages import Bundle, Node
from vllm_omni.errors import ConfigError

GIB = 1 << 30
SPANS = ("thinker.tensor_parallel_size=2", "thinker.nodes=2")  # an engine on two nodes


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


# -- engines that span nodes -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "each"), [(cards, {"GPU": 1.0}), (cpu, {"CPU": 2.0})])
def test_parts_of_an_engine_are_on_different_nodes_beside_other_stages(
    tiny_checkpoint: Path, kind: Any, each: dict[str, float]
) -> None:
    made = spread(config(tiny_checkpoint, *SPANS), [kind("a", 1), kind("bb", 1)])
    assert made[0].stage("thinker").host == ["a", "bb"]
    assert shares(made) == {"a": (("thinker", "talker"), each), "bb": (("thinker/node1", "token2wav"), each)}
    assert [(one.bundle.node, one.is_chosen) for one in made[1]] == [("id-a", True), ("id-bb", True)]


@pytest.mark.parametrize("kind", [cards, cpu])
def test_the_nodes_that_a_host_names_have_the_parts_in_its_order(tiny_checkpoint: Path, kind: Any) -> None:
    where = ("thinker.tensor_parallel_size=4", "thinker.nodes=2", "thinker.host=[id-bb, a.local]", "talker.host=a")
    made = spread(config(tiny_checkpoint, *where, "token2wav.host=ccc"), [kind("a", 4), kind("bb", 4), kind("ccc", 4)])
    assert made[0].stage("thinker").host == ["bb", "a"]
    assert {host: engines for host, (engines, _) in shares(made).items()} == {
        "bb": ("thinker",),
        "a": ("thinker/node1", "talker"),
        "ccc": ("token2wav",),
    }
    if kind is cards:
        assert [one.bundle.resources for one in made[1]] == [{"GPU": 2.0}, {"GPU": 2.0}, {"GPU": 1.0}]
    assert not any(one.is_chosen for one in made[1])


def test_two_engines_that_span_nodes_share_them(tiny_checkpoint: Path) -> None:
    both = (*SPANS, "talker.tensor_parallel_size=2", "talker.nodes=2")
    made = spread(config(tiny_checkpoint, *both), [cards("a", 1), cards("bb", 1)])
    by_host = {host: engines for host, (engines, _) in shares(made).items()}
    assert by_host["a"][:2] == ("thinker", "talker")
    assert by_host["bb"][:2] == ("thinker/node1", "talker/node1")
    assert {one.spanning for one in made[1]} == {frozenset({"thinker", "talker"})}


def test_an_engine_waits_for_as_many_nodes_as_it_spans(tiny_checkpoint: Path) -> None:
    three = config(tiny_checkpoint, "thinker.tensor_parallel_size=3", "thinker.nodes=3")
    with pytest.raises(NotYet, match=r"thinker finds no place: it needs a card on each of 3 hosts .* 2 have as many"):
        spread(three, [cards("a", 1), cards("bb", 1)])
    with pytest.raises(NotYet, match=r"it needs 3 hosts .*of 2 hosts 2 have as many: add 1 host like a"):
        spread(three, [cpu("a"), cpu("bb")])
    with pytest.raises(NotYet, match="no card or CPU is free on bb"):
        spread(config(tiny_checkpoint, *SPANS, "thinker.host=[a, bb]"), [cards("a", 1), cards("bb", 1, free=0)])


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["thinker.host=[a, 10.0.1.1]"], r"engine 'thinker': nodes = 2: .*: '10\.0\.1\.1' is the node of another part"),
        (["thinker.host=[a, bbb]"], r"engine 'thinker': host = 'bbb': the cluster has no such node"),
        (
            ["thinker.replicas=2"],
            r"each stage has a host: stage 'thinker': nodes = 2: cannot be combined with replicas",
        ),
        (["thinker.tensor_parallel_size=3"], r"nodes = 2: cannot share tensor_parallel_size = 3 evenly"),
        (["thinker.device_ids=[0, 1]"], r"nodes = 2: each host chooses its devices"),
    ],
)
def test_what_no_cluster_could_span_is_rejected(tiny_checkpoint: Path, overrides: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        spread(config(tiny_checkpoint, *SPANS, *overrides), [cpu("a"), cpu("bb")])


# -- another node for a share whose own is gone ------------------------------------------------------------------------


def on(node: Node, *, is_chosen: bool = True, spanning: str = "thinker", resource: str = "CPU") -> Share:
    """A share on a node, with a part of the thinker."""
    spans = frozenset(spanning.split())
    return Share(Bundle(node.name, node.id, {resource: 2.0}), ("thinker",), is_chosen, spans)


def test_a_part_moves_to_a_node_without_the_other_parts_and_with_as_much_room() -> None:
    first, second = on(cpu("a")), on(cpu("bb"))
    nodes = [cpu("a"), cpu("ccc", num_cpus=1.0), cpu("d", num_cpus=4.0), cpu("e"), cards("f", 4)]
    moved = move(second, [first, second], nodes)
    assert moved.bundle == Bundle("bb", "id-d", {"CPU": 2.0})
    assert move(first, [first, moved], nodes[2:]).bundle.node == "id-e"


def test_a_part_moves_to_a_node_with_cards_for_its_ranks() -> None:
    first, second = on(cards("a", 4), resource="GPU"), on(cards("bb", 4), resource="GPU")
    nodes = [cards("a", 4), cpu("c"), cards("d", 4, free=1), cards("e", 4, free=2)]
    assert move(second, [first, second], nodes).bundle.node == "id-e"


def test_a_part_waits_while_the_only_other_node_has_a_part_of_its_engine() -> None:
    first, second = on(cpu("a")), on(cpu("bb"))
    with pytest.raises(NotYet, match="node bb is gone, and no other node has 2 CPU free and no part of thinker"):
        move(second, [first, second], [cpu("a")])


def test_a_part_does_not_take_the_node_for_which_another_part_waits() -> None:
    named, chosen = on(cpu("a"), is_chosen=False), on(cpu("bb"))
    again = Node("id-new", "a", "10.9.9.9", "x", False, 0, 8.0, GIB)
    with pytest.raises(NotYet, match="node a is gone, and the deployment names it"):
        move(named, [named, chosen], [cpu("ccc")])
    with pytest.raises(NotYet, match="node bb is gone, and no other node"):
        move(chosen, [named, chosen], [again])
    assert move(named, [named, chosen], [again]).bundle.node == "id-new"


def test_ray_chooses_the_node_of_a_share_without_a_part_unless_one_of_its_name_is_there() -> None:
    share = on(cpu("a"), spanning="")
    assert move(share, [share, on(cpu("bb"))], [cpu("bb")]).bundle.node == ""
    again = Node("id-new", "a", "10.9.9.9", "x", False, 0, 8.0, GIB)
    assert move(share, [share, on(cpu("bb"))], [cpu("bb"), again]).bundle.node == "id-new"


# -- settings ----------------------------------------------------------------------------------------------------------


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
