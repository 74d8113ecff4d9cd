import pytest

from vllm_omni.flow import ENTRY
from vllm_omni.flow.graph.plan import Edge
from vllm_omni.flow.run.frame import NO_BUCKET, Root, Trace
from vllm_omni.flow.run.identity import activation_id, bucket_for, derive_activation_id

DIRECT = Edge("a.run", "y", "b.run", "x")
PER_FRAME = Edge("a.run", "y", "b.run", "x", per_frame=True)
JOIN = Edge("a.run", "y", "j.run", "x", root="fork.run")
JOIN_PER_FRAME = Edge("a.run", "y", "j.run", "x", root="fork.run", root_per_frame=True)


def below_fork(index, path=()):
    return Trace((index, *path), (Root(ENTRY, 0, 0, 0, ()), Root("fork.run", 5, index, 0, ())))


def test_activation_id_depends_on_every_part_of_the_key():
    base = (1, "a.run", 0, "b.run", 0)
    others = [(2, "a.run", 0, "b.run", 0), (1, "c.run", 0, "b.run", 0), (1, "a.run", 1, "b.run", 0)]
    others += [(1, "a.run", 0, "c.run", 0), (1, "a.run", 0, "b.run", 1)]
    assert len({derive_activation_id(*key) for key in [base, *others]}) == 6


def test_activation_id_is_the_same_in_every_process_and_version():
    assert derive_activation_id(0, ENTRY, 0, "thinker.generate", 0) == 60101516669411371


def test_rule_a_all_frames_of_a_stream_feed_one_activation():
    assert activation_id(DIRECT, Trace(), 7, 0) == activation_id(DIRECT, Trace(), 7, 3)


def test_rule_a_each_frame_feeds_an_activation_of_its_own():
    assert activation_id(PER_FRAME, Trace((0,)), 7, 0) != activation_id(PER_FRAME, Trace((1,)), 7, 1)


def test_rule_c_takes_the_common_source_rather_than_the_sender():
    assert activation_id(JOIN_PER_FRAME, below_fork(1), 7, 0) == activation_id(
        JOIN_PER_FRAME, below_fork(1, (4,)), 8, 2
    )


def test_rule_c_frames_of_two_yields_of_the_fork_do_not_meet():
    assert activation_id(JOIN_PER_FRAME, below_fork(0), 7, 0) != activation_id(JOIN_PER_FRAME, below_fork(1), 7, 0)


def test_rule_c_all_yields_meet_where_the_bucket_is_of_the_activation():
    assert activation_id(JOIN, below_fork(0), 7, 0) == activation_id(JOIN, below_fork(1), 7, 0)


@pytest.mark.parametrize("edge, known", [(DIRECT, False), (JOIN, True), (JOIN_PER_FRAME, False)])
def test_count_at_the_fork_itself_is_for_a_bucket_of_its_activation_only(edge, known):
    at_fork = Trace((), below_fork(0).roots)
    assert (bucket_for(edge, at_fork) != NO_BUCKET) == known


def test_count_below_the_fork_is_for_the_bucket_of_that_yield():
    assert bucket_for(JOIN_PER_FRAME, below_fork(1, (4,))) == activation_id(JOIN_PER_FRAME, below_fork(1), 7, 0)
