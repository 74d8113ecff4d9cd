"""What holds in every plan, of random stages on random hosts, and in large ones."""

import dataclasses
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.deploy.clusters import GIB, cards, cpu, memory, rejected
from tests.fuzz import num_cases
from vllm_omni.deploy.placement import PlacementPlan, plan
from vllm_omni.deploy.resources import Host, Place, Replica, Stage
from vllm_omni.deploy.search import Rules, Search
from vllm_omni.deploy.shortage import NoPlace
from vllm_omni.errors import ConfigError
from vllm_omni.process.memory import DEVICE_SHARE, HOST_SHARE

HOSTS = st.lists(
    st.one_of(
        st.builds(cards, st.just(""), st.integers(1, 8), st.sampled_from([24, 80])),
        st.builds(cpu, st.just(""), st.sampled_from([32, 128])),
    ),
    min_size=1,
    max_size=6,
).map(lambda hosts: [dataclasses.replace(one, name=f"h{index}") for index, one in enumerate(hosts)])

NEEDS = st.one_of(
    st.none(),
    st.builds(
        lambda weights, cache, activations: memory(weights, cache=cache, activations=activations * GIB),
        st.sampled_from([1, 4, 16, 40]),
        st.sampled_from([0, 0.5, 4]),
        st.sampled_from([0, 1]),
    ),
)


@st.composite
def stages_of(draw: Callable[..., Any]) -> list[Stage]:
    names = draw(st.integers(1, 4).map(lambda number: "abcd"[:number]))
    made = []
    for name in names:
        nodes, needs = draw(st.sampled_from([1, 1, 1, 2])), draw(NEEDS)
        made.append(
            Stage(
                name=name,
                replicas=draw(st.integers(1, 5)),
                ranks=nodes * draw(st.sampled_from([1, 1, 2, 4])),
                nodes=nodes,
                layer=draw(st.sampled_from([0, 0, 1, 2])),
                may_share=draw(st.booleans()),
                memory=needs,
                shared_weights=f"{needs.weights} bytes" if needs is not None and draw(st.booleans()) else None,
                near=frozenset(draw(st.sets(st.sampled_from(names)))) - {name},
            )
        )
    return made


def check(made: PlacementPlan) -> None:
    """What holds in every plan."""
    stages = {one.name: one for one in made.stages}
    devices = {Place(host.name, device.name): device for host in made.hosts for device in host.devices}
    taken: dict[int, Counter[Place]] = {}
    for one in made.replicas:
        stage = stages[one.stage]
        assert set(one.places) <= devices.keys()
        assert (len(one.places), len(one.hosts)) == (stage.ranks, stage.nodes)
        for host in one.hosts:
            is_card = not devices[Place(host, one.devices_on(host)[0])].is_host
            assert len(one.devices_on(host)) == (stage.ranks_per_node if is_card else 1)
        assert one.layer == stage.layer or (stage.may_share and one.layer > stage.layer)
        taken.setdefault(one.layer, Counter()).update(set(one.places))
    assert all(number == 1 for layer in taken.values() for number in layer.values()), "a card is owned twice in a layer"
    owned = taken.get(0, Counter()).keys()
    assert all(layer.keys() <= owned for layer in taken.values()), "a layer is not contained in layer 0"
    numbers = Counter(one.stage for one in made.replicas if not one.is_draining)
    assert numbers == {one.name: one.replicas for one in made.stages if one.replicas}
    made.memory()  # which raises if a device has too little
    for place, device in devices.items():  # the same by another way
        ranks = [(one, stages[one.stage].memory) for one in made.replicas for its in one.places if its == place]
        known = [needs for _, needs in ranks if needs is not None]
        weights = _weights(made, place, stages, is_host=device.is_host)
        left = device.free - weights - sum(needs.activations for needs in known)
        room = left * HOST_SHARE if device.is_host else left - device.total * (1 - DEVICE_SHARE)
        assert not known or sum(needs.cache_min for needs in known) <= room


def _weights(made: PlacementPlan, place: Place, stages: dict[str, Stage], *, is_host: bool) -> int:
    """Bytes on a device; weights that are mapped count once for each rank."""
    total, mapped = 0, set()
    for one in made.replicas:
        stage = stages[one.stage]
        for rank, its in enumerate(one.places):
            if its != place or stage.memory is None:
                continue
            key = (stage.shared_weights, rank)
            is_mapped = stage.shared_weights is not None and stage.nodes == 1 and is_host
            if not (is_mapped and key in mapped):
                total += stage.memory.weights
            mapped.add(key)
    return total


def check_rejection(error: NoPlace, stages: Sequence[Stage], hosts: Sequence[Host]) -> None:
    assert error.short in ("devices", "memory")
    assert error.missing > 0
    assert error.replica.partition("/")[0] in {one.name for one in stages}
    assert error.where.rpartition(" of ")[2] in {one.name for one in hosts}
    if error.change is not None:
        assert str(error).endswith(error.change.text)
        check(plan(error.change.stages, error.change.hosts))


@settings(max_examples=num_cases(2000), deadline=None)
@given(stages_of(), HOSTS)
def test_every_plan_that_is_admitted_fits_and_every_rejection_has_a_change_that_fits(
    stages: list[Stage], hosts: list[Host]
) -> None:
    try:
        made = plan(stages, hosts)
    except NoPlace as error:
        check_rejection(error, stages, hosts)
        return
    check(made)
    assert plan(stages, hosts) == made  # the same every time
    assert plan(stages, hosts, made) == made  # and of what runs


@settings(max_examples=num_cases(1000), deadline=None)
@given(stages_of(), HOSTS, st.data())
def test_no_change_moves_what_runs(stages: list[Stage], hosts: list[Host], data: st.DataObject) -> None:
    made = PlacementPlan((), tuple(hosts), ())
    for _ in range(8):
        before = made
        kind = data.draw(st.sampled_from(["plan", "add", "remove", "release", "host leaves", "host joins"]))
        try:
            made = _change(made, kind, stages, data)
        except ConfigError:
            continue
        check(made)
        there = {Place(host.name, device.name) for host in made.hosts for device in host.devices}
        after = {one.name: one for one in made.replicas}
        for one in before.replicas:
            if kind == "release" and one.name not in after:
                continue
            if kind != "host leaves":
                assert after[one.name].places == one.places
            elif one.owns_devices and there.issuperset(one.places):
                assert after[one.name].places == one.places, "it has moved, and its host is still there"


def _change(made: PlacementPlan, kind: str, stages: list[Stage], data: st.DataObject) -> PlacementPlan:
    if kind == "plan":
        numbers = data.draw(st.lists(st.integers(0, 4), min_size=len(stages), max_size=len(stages)))
        wanted = [dataclasses.replace(one, replicas=number) for one, number in zip(stages, numbers, strict=True)]
        return plan(wanted, made.hosts, made)
    if kind == "add":
        return made.add(data.draw(st.sampled_from(stages)).name)
    if kind == "host joins":
        return plan(made.stages, [*made.hosts, cards(f"h{len(made.hosts)}-{data.draw(st.integers(0, 99))}", 4)], made)
    if kind == "host leaves":
        gone = data.draw(st.sampled_from(made.hosts))
        return plan(made.stages, [one for one in made.hosts if one is not gone], made)
    if not made.replicas:
        return made
    name = data.draw(st.sampled_from(made.replicas)).name
    return made.remove(name) if kind == "remove" else made.release(name)


# -- size --------------------------------------------------------------------------------------------------------------


def test_a_thousand_replicas_on_a_thousand_hosts_take_few_offers() -> None:
    hosts = [cards(f"box-{number}") for number in range(1000)]
    thinker = Stage(name="thinker", replicas=300, ranks=4, memory=memory(15))
    talker = Stage(name="talker", replicas=700, layer=1, may_share=True, memory=memory(3), near=frozenset({"thinker"}))
    found = Search({one.name: one for one in (thinker, talker)}, hosts, Rules())
    placed: list[Replica] = found.place({"thinker": range(300), "talker": range(700)})
    assert len(placed) == 1000
    assert sum(host.num_offers for host in found.hosts) == 2 * len(hosts) + len(placed)


def test_a_large_cluster_that_is_too_small_is_described() -> None:
    hosts = [cards(f"box-{number}") for number in range(200)]
    error = rejected([Stage(name="thinker", replicas=500, ranks=4, memory=memory(15))], hosts)
    assert "replica thinker/400 (and 99 more of thinker) finds no place" in str(error)
    assert str(error).endswith("give thinker.replicas=400")
