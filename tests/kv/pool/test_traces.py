"""Hit ratios of the eviction policies on generated traces, through vLLM's own offloading manager."""

import itertools

import pytest

from tests.fuzz import seeds
from tests.kv.pool.replay import DUEL, replay
from vllm_omni.testing.cache_traces import TRACES, extend

FREQUENCY_WINS = ("zipf", "scans", "rag")
MAX_LOSS = 0.005  # against LRU, on any trace
MIN_GAIN = 0.04  # over LRU, where frequency wins; in a short trace little time is left after the duel is decided
MIN_GAIN_SHORT = 0.03
SHORT = 0.25  # of the full size


def check(name: str, scale: float, seed: int, min_gain: float) -> None:
    case = TRACES[name]
    requests = list(case.requests(round(case.num_requests * scale), seed))
    lru, arc, duel = (replay(requests, case.num_pages, policy) for policy in ("lru", "arc", DUEL))
    duel.policy.check_integrity()
    figures = ", ".join(
        f"{policy} {one.hit_ratio:.3f} ({one.us_per_page:.1f} us per page)"
        for policy, one in (("LRU", lru), ("ARC", arc), ("duel", duel))
    )
    print(f"{name}, seed {seed}: {figures}")
    assert duel.hit_ratio >= lru.hit_ratio - MAX_LOSS, figures
    if name in FREQUENCY_WINS:
        assert duel.hit_ratio >= lru.hit_ratio + min_gain, figures


@pytest.mark.parametrize("name", TRACES)
def test_the_duel_hits_as_often_as_lru_and_more_often_where_frequency_wins(name: str) -> None:
    check(name, SHORT, 1, MIN_GAIN_SHORT)


@pytest.mark.long
@pytest.mark.fuzz
@pytest.mark.parametrize("seed", seeds(1))
@pytest.mark.parametrize("name", TRACES)
def test_the_duel_at_full_size(name: str, seed: int) -> None:
    check(name, 1.0, seed, MIN_GAIN)


@pytest.mark.parametrize("name", TRACES)
def test_a_trace_is_the_same_each_time_and_has_chains(name: str) -> None:
    case = TRACES[name]
    requests = list(case.requests(300, 7))
    assert requests == list(case.requests(300, 7))
    assert requests != list(case.requests(300, 8))
    parents: dict[bytes, bytes] = {}
    for chain in requests:
        assert len(set(chain)) == len(chain), "a request uses a page twice"
        for parent, page in itertools.pairwise([b"", *chain]):
            assert parents.setdefault(page, parent) == parent, "a page with two prefixes"


def test_chains_share_pages_as_far_as_their_names_are_equal() -> None:
    first, second = extend([], "a", "b", "c"), extend([], "a", "b", "d", "c")
    assert first[:2] == second[:2]
    assert not set(first[2:]) & set(second[2:])
