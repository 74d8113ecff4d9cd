"""Random graphs, random nodes, random links, random ends, against the reference: nothing is lost, doubled, joined with
another's or out of order, every call ends, and nothing is left.

``FUZZ_CASES`` says how many (``make fuzz`` runs many more). A failing case prints its seed and the graph; to see it
again: ``FUZZ_SEED=<seed> FUZZ_CASES=1``.
"""

import asyncio
import os
import random
from collections import Counter

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.flow.builders import ShufflingLink, spin
from tests.flow.random_graphs import make_case
from tests.flow.reference import TooLarge
from vllm_omni.errors import CallAborted, GraphError, PlanError
from vllm_omni.flow import EndReason, FlowStatistics, GraphParser, GraphRuntime, InProcessLink

NUM_CASES = int(os.environ.get("FUZZ_CASES", "20000"))
SEED = os.environ.get("FUZZ_SEED")
DEADLINE_S = 30.0


async def read_all(rng, call):
    """Payloads per output, the error that ended the call, and whether the reader left early."""
    got, leave_after = {}, rng.randrange(12) if rng.random() < 0.15 else None
    try:
        async for frame in call:
            if frame.reason is EndReason.NONE:
                got.setdefault(frame.field, []).append(frame.payload)
            if rng.random() < 0.2:
                await asyncio.sleep(0)
            if leave_after is not None:
                leave_after -= 1
                if leave_after < 0:
                    await (call.abort() if rng.random() < 0.5 else call.aclose())
                    return got, None, True
    except Exception as exc:
        return got, exc, False
    return got, None, False


async def run_case(seed, counts):
    rng = random.Random(seed)
    case = make_case(rng)
    try:
        plan = GraphParser(case.graph).parse()
    except (GraphError, PlanError):
        counts["refused"] += 1
        return
    nodes = case.make_nodes(rng)
    link = ShufflingLink(rng) if rng.random() < 0.6 else InProcessLink()
    runtime = GraphRuntime(plan, nodes, link=link)
    session = "s" if rng.random() < 0.1 else None
    call = runtime.open("c", case.inputs, case.outputs, deadline_s=DEADLINE_S, session=session)
    got, error, has_left = await read_all(rng, call)
    await spin()  # duplicates still under way on the link
    if has_left:
        assert error is None or isinstance(error, CallAborted), f"seed {seed}: {error!r}"
        counts["left"] += 1
    else:
        try:
            case.check(nodes, got, error)
            counts[case.expected.outcome.value] += 1
        except TooLarge:  # if the other group wins
            counts["too large"] += 1
    assert runtime.statistics() == FlowStatistics(0, 0, 0, 0), f"seed {seed}: {runtime.statistics()}"
    assert asyncio.all_tasks() == {asyncio.current_task()}, f"seed {seed}"


@pytest.mark.fuzz
def test_random_graphs_do_what_the_reference_does_and_leave_nothing():
    counts = Counter()

    with asyncio.Runner() as runner:

        @settings(
            max_examples=NUM_CASES,
            deadline=None,
            database=None,
            derandomize=SEED is None,
            phases=[Phase.explicit, Phase.generate],
            suppress_health_check=list(HealthCheck),
            print_blob=False,
        )
        @given(seed=st.integers(0, 2**48) if SEED is None else st.just(int(SEED)))
        def run(seed):
            try:
                runner.run(run_case(seed, counts))
            except BaseException:
                print(f"FUZZ_SEED={seed}")
                raise

        run()
    print(f"{sum(counts.values())} cases: {dict(counts)}")
    assert counts["refused"] <= 0.1 * sum(counts.values())
