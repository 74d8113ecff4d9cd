"""Where replicas go, in small clusters."""

import dataclasses
from collections import Counter

import pytest

from tests.deploy.clusters import GIB, cards, cpu, memory, qwen, rejected, where
from vllm_omni.deploy.placement import plan
from vllm_omni.deploy.resources import Host, Place, Stage
from vllm_omni.deploy.shortage import NoPlace
from vllm_omni.errors import ConfigError
from vllm_omni.process.memory import Device

# -- layers ------------------------------------------------------------------------------------------------------------


def test_on_one_card_all_stages_share_it() -> None:
    made = plan(qwen(), [cards("a", 1)])
    assert where(made) == {"thinker/0": ["a cuda:0"], "talker/0": ["a cuda:0"], "token2wav/0": ["a cuda:0"]}
    assert [(one.layer, one.owns_devices) for one in made.replicas] == [(0, True), (1, False), (2, False)]


def test_what_shares_goes_to_cards_that_are_owned_alone() -> None:
    made = plan(qwen(), [cards("a"), cards("b")])
    assert {place.host for one in made.replicas for place in one.places} == {"a"}
    assert len({place for one in made.replicas for place in one.places}) == 1


def test_ranks_of_a_stage_have_cards_of_their_own_and_others_spread_over_them() -> None:
    made = plan(qwen(ranks=2), [cards("a")])
    assert where(made) == {"thinker/0": ["a cuda:0", "a cuda:1"], "talker/0": ["a cuda:0"], "token2wav/0": ["a cuda:1"]}


def test_on_the_only_card_the_stage_that_must_not_share_owns_it() -> None:
    thinker, talker, _ = qwen()
    made = plan([thinker, dataclasses.replace(talker, layer=0, may_share=False)], [cards("a", 1)])
    assert {one.name: one.layer for one in made.replicas} == {"talker/0": 0, "thinker/0": 1}


def test_what_shares_spreads_over_owners_first() -> None:
    thinker, talker, _ = qwen(replicas=2, ranks=2)
    made = plan([thinker, dataclasses.replace(talker, replicas=2)], [cards("a", 4)])
    assert [where(made)[f"talker/{number}"] for number in range(2)] == [["a cuda:0"], ["a cuda:2"]]


def test_a_stage_of_layer_0_has_cards_of_its_own() -> None:
    thinker, talker, vocoder = qwen()
    made = plan([thinker, dataclasses.replace(talker, layer=0, may_share=False), vocoder], [cards("a")])
    assert where(made)["thinker/0"] != where(made)["talker/0"]
    assert sum(one.owns_devices for one in made.replicas) == 2


def test_replicas_of_the_first_stage_take_further_cards_and_share_where_there_are_none() -> None:
    two = qwen(replicas=2)
    assert [one.layer for one in plan(two, [cards("a", 2)]).of_stage("thinker")] == [0, 0]
    assert [one.layer for one in plan(two, [cards("a", 1)]).of_stage("thinker")] == [0, 2]
    assert [one.layer for one in plan(two, [cards("a", 1)]).of_stage("talker")] == [1]


def test_devices_of_a_replica_are_those_that_its_processes_see() -> None:
    made = plan([Stage(name="thinker", ranks=4, nodes=2)], [cards("a", 2), cards("b", 2)])
    (one,) = made.replicas
    assert one.hosts == ("a", "b")
    assert one.devices_on("b") == ("cuda:0", "cuda:1")


def test_cards_that_the_configuration_names_are_taken_first() -> None:
    stages = [Stage(name="a", may_share=True), Stage(name="b", may_share=True, pinned=((0,),))]
    assert where(plan(stages, [cards("h", 2)])) == {"a/0": ["h cuda:1"], "b/0": ["h cuda:0"]}
    both = [Stage(name=name, may_share=True, pinned=((1,),)) for name in "ab"]
    assert where(plan(both, [cards("h", 2)])) == {"a/0": ["h cuda:1"], "b/0": ["h cuda:1"]}


# -- hosts -------------------------------------------------------------------------------------------------------------


def test_a_host_without_cards_is_one_device_that_stages_share() -> None:
    made = plan(qwen(ranks=2), [cpu("a")])
    assert where(made) == {"thinker/0": ["a cpu", "a cpu"], "talker/0": ["a cpu"], "token2wav/0": ["a cpu"]}
    assert len(made.memory()[Place("a", "cpu")].stages) == 4


def test_stages_of_layer_0_are_on_a_host_each_where_hosts_have_no_cards() -> None:
    stages = [Stage(name=name, memory=memory(1)) for name in ("thinker", "talker", "token2wav")]
    made = plan(stages, [cpu("a"), cpu("b"), cpu("c")])
    assert sorted(one.hosts for one in made.replicas) == [("a",), ("b",), ("c",)]


def test_ranks_may_span_hosts_without_cards() -> None:
    made = plan([Stage(name="thinker", ranks=2, nodes=2)], [cpu("a"), cpu("b")])
    assert where(made) == {"thinker/0": ["a cpu", "b cpu"]}


def test_a_host_without_cards_gets_nothing_beside_hosts_with_cards() -> None:
    assert where(plan([Stage(name="a")], [cpu("head", 1024), cards("worker", 1)])) == {"a/0": ["worker cuda:0"]}


def test_stages_that_exchange_much_are_on_one_host() -> None:
    thinker = Stage(name="thinker", replicas=2, ranks=4, near=frozenset({"talker"}))
    talker = Stage(name="talker", replicas=2, near=frozenset({"thinker"}))
    made = plan([thinker, talker], [cards("a", 6), cards("b", 6), cards("c", 1), cards("d", 1)])
    hosts = {one.name: one.hosts for one in made.replicas}
    assert hosts["talker/0"] == hosts["thinker/0"] != hosts["talker/1"] == hosts["thinker/1"]


def test_instances_of_a_stage_are_on_one_host() -> None:
    kinds = ("thinker/E", "thinker/P", "thinker/D")
    stages = [Stage(name=name, near=frozenset(kinds) - {name}) for name in kinds]
    assert {one.hosts for one in plan(stages, [cards("a", 2), cards("b", 3)]).replicas} == {("b",)}


def test_being_near_costs_no_place() -> None:
    """Beside the thinker, the talker would take the memory that only the big stage of layer 1 can use."""
    stages = [
        Stage(name="thinker", memory=memory(30), near=frozenset({"talker"})),
        Stage(name="other", memory=memory(20)),
        Stage(name="talker", layer=1, memory=memory(4), near=frozenset({"thinker"})),
        Stage(name="big", layer=1, ranks=1, memory=memory(40), pinned=((0,),)),
    ]
    made = plan(stages, [cards("a", 1), cards("b", 1, gib=32)])
    assert where(made)["thinker/0"] == where(made)["big/0"] == ["a cuda:0"]
    assert where(made)["talker/0"] == where(made)["other/0"] == ["b cuda:0"]


def test_small_replicas_leave_whole_hosts_to_large_ones() -> None:
    stages = [Stage(name="small", replicas=3), Stage(name="large", ranks=8)]
    made = plan(stages, [cards("a"), cards("b", 3)])
    assert {one.hosts for one in made.of_stage("small")} == {("b",)}
    later = plan([Stage(name="small", replicas=3)], [cards("a"), cards("b", 4)])
    assert {one.hosts for one in later.replicas} == {("b",)}


# -- memory ------------------------------------------------------------------------------------------------------------


def test_the_emptiest_of_equal_cards_is_taken() -> None:
    used, free = cards("a", 1), cards("b", 1)
    used = dataclasses.replace(used, devices=(Device(name="cuda:0", total=80 * GIB, free=40 * GIB),))
    assert where(plan([Stage(name="x", memory=memory(16))], [used, free])) == {"x/0": ["b cuda:0"]}
    little_less = dataclasses.replace(used, devices=(Device(name="cuda:0", total=80 * GIB, free=80 * GIB - 1),))
    assert where(plan([Stage(name="x", memory=memory(16))], [little_less, free])) == {"x/0": ["a cuda:0"]}


def test_a_stage_that_shares_its_card_gets_one_that_has_room_for_both() -> None:
    stages = [Stage(name="a", ranks=2, memory=memory(16)), Stage(name="b", layer=1, memory=memory(10))]
    assert {one.hosts for one in plan(stages, [cards("h", 2, gib=24), cards("i", 3, gib=80)]).replicas} == {("i",)}


def test_a_card_is_shared_only_while_its_memory_lasts() -> None:
    stages = [Stage(name="thinker", replicas=2, memory=memory(60)), *qwen()[1:]]
    made = plan([*stages[:1], dataclasses.replace(stages[1], replicas=8)], [cards("a", 2)])
    assert Counter(where(made)[f"talker/{number}"][0] for number in range(8)) == {"a cuda:0": 4, "a cuda:1": 4}


def test_a_share_of_a_device_is_of_the_device_that_a_rank_gets() -> None:
    stages = [Stage(name="thinker", memory=memory(16), memory_share=0.5)]
    (divided,) = plan(stages, [cards("a", 1, gib=80)]).memory().values()
    assert divided.caches == {"thinker/0": 40 * GIB - 16 * GIB}
    assert rejected(stages, [cards("a", 1, gib=24)]).short == "memory"


def test_weights_that_engines_map_count_once_on_a_host() -> None:
    stages = [Stage(name="thinker", replicas=4, may_share=True, memory=memory(20), shared_weights="w")]
    made = plan(stages, [cpu("a", 32)])
    (divided,) = made.memory().values()
    assert [one.weights for one in divided.stages] == [20 * GIB, 0, 0, 0]
    assert rejected([dataclasses.replace(stages[0], shared_weights=None)], [cpu("a", 32)]).short == "memory"


def test_unknown_needs_are_not_checked() -> None:
    assert len(plan(qwen(memory=None, replicas=2), [cards("a", 1, gib=16)]).replicas) == 4


# -- rejections --------------------------------------------------------------------------------------------------------


def test_too_few_cards_name_the_replica_and_the_host_that_lacks_least() -> None:
    error = rejected([Stage(name="thinker", replicas=4, ranks=4)], [cards("a", 8), cards("b", 6)])
    assert (error.replica, error.short, error.missing, error.where) == ("thinker/3", "devices", 2, "b")
    assert str(error) == (
        "replica thinker/3 finds no place: it needs 4 cards on one host that no other replica of layer 0 owns, "
        "and of 2 hosts b has 2: give thinker.replicas=3"
    )


def test_ranks_that_fit_no_host_may_span_several() -> None:
    error = rejected([Stage(name="thinker", ranks=16)], [cards("a"), cards("b")])
    assert str(error).endswith("of 2 hosts a has 8: give thinker.nodes=2")


def test_a_stage_that_wants_devices_of_its_own_may_share() -> None:
    assert str(rejected([Stage(name="a"), Stage(name="b")], [cpu("h")])) == (
        "replica b/0 finds no place: it needs a host that no other replica of layer 0 owns, and of 1 host h has 0: "
        "leave b.layer out, so that it shares"
    )


def test_too_little_memory_is_described_with_all_that_would_be_on_the_device() -> None:
    thinker, talker, vocoder = qwen(memory=memory(16, cache=2, activations=GIB))
    error = rejected([thinker, talker, vocoder], [cpu("a", 24)])
    assert (error.short, error.where, error.missing) == ("memory", "cpu of a", GIB)
    assert str(error) == (
        "device cpu: 1.0 GiB of memory are missing for its stages: talker: weights 3.0 GiB, activations 0 B; "
        "thinker: weights 16.0 GiB, activations 1.0 GiB, cache 2.0 GiB at least; token2wav: weights 2.0 GiB, "
        "activations 0 B; it has 24.0 GiB free of 24.0 GiB: give thinker.max_model_len=2048"
    )


def test_the_change_counts_the_copies_of_a_stage_on_a_device() -> None:
    error = rejected([Stage(name="thinker", ranks=2, memory=memory(4, cache=2))], [cpu("a", 14)])
    assert "2 ranks of thinker: weights 8.0 GiB" in str(error)
    assert error.change is not None
    assert error.change.text == "give thinker.max_model_len=3072"
    needs = error.change.stages[0].memory
    assert needs is not None
    assert (needs.weights, needs.cache_min, needs.max_model_len) == (4 * GIB, 3 * GIB // 2, 3072)


def test_where_no_setting_helps_further_hosts_are_counted() -> None:
    stages = [Stage(name="a", memory=memory(30)), Stage(name="b", memory=memory(70))]
    assert str(rejected(stages, [cards("h", 1)])).endswith("h has 0: add 1 host like h (1 card of 80.0 GiB)")
    assert str(rejected([Stage(name="a", ranks=4)], [cards("h", 2)])).endswith("give it fewer ranks, or larger hosts")


@pytest.mark.parametrize(
    ("stages", "hosts", "message"),
    [
        ([Stage(name="a")], [], "the inventory has no hosts"),
        ([Stage(name="a")], [Host("h", ())], "host 'h': has no device"),
        ([Stage(name="a")], [dataclasses.replace(cards("h", 2), has_cards=False)], "without cards it has one device"),
        ([Stage(name="a")], [cpu("h"), cpu("h")], "two hosts have the name 'h'"),
        ([Stage(name="a"), Stage(name="a")], [cpu("h")], "stages: two have one name"),
        ([Stage(name="a", ranks=6, nodes=4)], [cpu("h")], "nodes = 4: cannot share its 6 ranks evenly; give nodes = 3"),
        ([Stage(name="a", pinned=((0,),), replicas=2)], [cpu("h")], "device_ids name the cards of 1 replicas, and"),
        ([Stage(name="a", pinned=((0, 1),))], [cpu("h")], "a replica has 1 ranks, and device_ids name 2 cards"),
        ([Stage(name="a", pinned=((0, 1),), ranks=2, nodes=2)], [cpu("h")], "device_ids name cards of one host"),
        ([Stage(name="a", near=frozenset({"b"}))], [cpu("h")], "near b: there is no such stage"),
        ([Stage(name="a", ranks=0)], [cpu("h")], "ranks and nodes at least 1"),
    ],
)
def test_what_no_plan_could_honour_is_rejected(stages: list[Stage], hosts: list[Host], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        plan(stages, hosts)


# -- change ------------------------------------------------------------------------------------------------------------


def test_a_further_replica_moves_nothing() -> None:
    made = plan(qwen(), [cards("a", 2)])
    more = made.add("talker", 2)
    assert set(made.replicas) < set(more.replicas)
    assert [one.name for one in more.of_stage("talker")] == ["talker/0", "talker/1", "talker/2"]
    with pytest.raises(ConfigError, match="no stage 'tolker': did you mean 'talker'"):
        made.add("tolker")


def test_a_removed_replica_has_its_devices_until_it_is_released() -> None:
    made = plan([Stage(name="a", replicas=2)], [cards("h", 2)])
    drained = made.remove("a/0")
    assert [one.is_draining for one in drained.replicas] == [True, False]
    with pytest.raises(NoPlace):
        drained.add("a")
    again = drained.release("a/0").add("a")
    assert again == made


def test_a_number_is_given_again_only_when_it_is_free() -> None:
    drained = plan([Stage(name="a", replicas=2)], [cards("h", 4)]).remove("a/0")
    assert [one.name for one in drained.add("a").replicas if not one.is_draining] == ["a/1", "a/2"]


def test_an_owner_leaves_after_what_is_on_its_devices() -> None:
    made = plan(qwen(), [cards("a", 1)])
    with pytest.raises(ConfigError, match="'thinker/0' owns the devices of talker/0, token2wav/0, which would have"):
        made.remove("thinker/0")
    left = made.remove("talker/0").remove("token2wav/0").remove("thinker/0")
    with pytest.raises(ConfigError, match="talker/0, token2wav/0 on its devices must be released first"):
        left.release("thinker/0")
    assert left.release("talker/0").release("token2wav/0").release("thinker/0").replicas == ()


def test_only_what_drains_can_be_released() -> None:
    made = plan([Stage(name="a")], [cards("h", 1)])
    with pytest.raises(ConfigError, match="replica 'a/0' runs: remove it, and release it when it has ended"):
        made.release("a/0")
    with pytest.raises(ConfigError, match="no replica 'a/1': did you mean 'a/0'"):
        made.remove("a/1")


def test_replicas_of_a_host_that_is_gone_are_placed_again() -> None:
    hosts = [cards("a", 1), cards("b", 1)]
    made = plan([Stage(name="x", replicas=2)], hosts)
    moved = plan(made.stages, [hosts[1], cards("c", 1)], made)
    assert where(moved) == {"x/0": ["c cuda:0"], "x/1": ["b cuda:0"]}


def test_what_was_on_devices_of_a_lost_owner_is_placed_again() -> None:
    stages = [Stage(name="wide", ranks=2, nodes=2), Stage(name="rider", layer=1, replicas=2)]
    made = plan(stages, [cards("a", 1), cards("b", 1)])
    moved = plan(stages, [cards("b", 1), cards("c", 1)], made)
    assert {place.host for one in moved.replicas for place in one.places} == {"b", "c"}


def test_stages_that_are_left_out_drain() -> None:
    made = plan(qwen(), [cards("a", 2)])
    fewer = plan(qwen()[:2], made.hosts, made)
    assert [(one.name, one.is_draining) for one in fewer.replicas] == [
        ("thinker/0", False),
        ("talker/0", False),
        ("token2wav/0", True),
    ]
    assert fewer.release("token2wav/0").replicas == plan(qwen()[:2], made.hosts).replicas


def test_of_several_replicas_those_leave_beneath_which_nothing_is() -> None:
    made = plan(qwen(replicas=3), [cards("a", 3)])
    beneath = {one.name for one in made.of_stage("thinker") if where(made)["talker/0"] == where(made)[one.name]}
    fewer = plan([dataclasses.replace(made.stages[0], replicas=2), *made.stages[1:]], made.hosts, made)
    (leaving,) = [one.name for one in fewer.replicas if one.is_draining]
    assert leaving not in beneath


def test_a_replica_with_other_needs_drains_while_another_starts() -> None:
    made = plan([Stage(name="a")], [cards("h", 4)])
    changed = plan([Stage(name="a", ranks=2)], made.hosts, made)
    assert [(one.name, len(one.places), one.is_draining) for one in changed.replicas] == [
        ("a/0", 1, True),
        ("a/1", 2, False),
    ]
