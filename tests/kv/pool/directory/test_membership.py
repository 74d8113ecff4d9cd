"""A node keeps its lease, and publishes again after it was lost."""

import pytest

from tests.kv.pool.directory.builders import World, keys, pages
from vllm_omni.kv.pool.directory import Member
from vllm_omni.kv.pool.directory.membership import Membership


def test_a_lease_that_is_renewed_in_time_stays(world: World) -> None:
    joins: list[Member] = []
    membership = Membership(world.directory, "a", on_join=joins.append)
    for _ in range(10):
        membership.step()
        world.clock.advance(1.0)
    assert joins == [membership.member]


def test_a_node_joins_again_after_its_lease_has_ended_and_publishes_its_pages(world: World) -> None:
    membership = Membership(
        world.directory, "a", on_join=lambda member: world.directory.publish(member, pages(1, 2)) and None
    )
    membership.step()
    first = membership.member
    world.clock.advance(3.0)
    membership.step()
    assert first is not None and membership.member is not None and membership.member.epoch > first.epoch
    reader = world.directory.join("b", 1.0)
    assert reader is not None
    assert len(world.directory.match_and_claim(reader, keys(1, 2), 1.0).pages) == 2
    assert world.directory.statistics().num_stale == 0  # swept after the new pages were there


def test_a_node_that_closes_leaves(world: World) -> None:
    membership = Membership(world.directory, "a", lease_s=100.0)
    membership.start()
    assert world.directory.statistics().num_members == 1
    membership.close()
    assert world.directory.statistics().num_members == 0


@pytest.mark.parametrize("wrong", [{"node": ""}, {"lease_s": 0.0}])
def test_wrong_arguments_are_rejected_before_anything_starts(world: World, wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError):
        Membership(world.directory, **{"node": "a", **wrong})  # type: ignore[arg-type]
