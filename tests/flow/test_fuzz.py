"""Random graphs, nodes, links and aborts against the reference: no payload is lost, doubled, joined with a wrong one or
out of order, every call ends, and nothing is left.

A failing case prints its seed and its graph (``tests/fuzz.py`` says how to run it alone).
"""

import asyncio
import logging
import multiprocessing
import random
from collections import Counter
from concurrent.futures import ProcessPoolExecutor

import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from tests.flow.builders import ShufflingLink, spin
from tests.flow.random_graphs import make_case
from tests.flow.reference import TooLarge
from tests.fuzz import ONLY_SEED, num_cases, seeds
from vllm_omni.errors import CallAborted, GraphError
from vllm_omni.flow import EndReason, FlowStatistics, Graph, GraphParser, GraphRuntime, InProcessLink, parse_graphs
from vllm_omni.flow.run import credit

FULL_SIZE = 6000
NUM_CASES = num_cases(FULL_SIZE)
NUM_PROCESSES = 2
DEADLINE_S = 30.0


async def read_all(rng, call):
    """The payloads of each output, the error that ended the call, and whether the reader left early."""
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


def within_another(case, plan):
    """The plans of a graph whose only node calls that of the case."""
    case.graph.graph_call("all", sorted(case.outputs))
    outer = Graph("outer")
    inputs = {name: outer.placeholder(name) for name in sorted(plan.route(case.outputs).placeholders)}
    called = outer.graph_ref(case.graph, "inner").all(**inputs)
    outer.output(**{name: getattr(called, name) for name in sorted(case.outputs)})
    return list(parse_graphs([outer]).values())


async def run_case(number, counts):
    rng = random.Random(number)
    case = make_case(rng)
    try:
        plans = [GraphParser(case.graph).parse()]
    except GraphError:
        counts["rejected"] += 1
        return
    if rng.random() < 0.2:
        plans = within_another(case, plans[0])
    nodes = case.make_nodes(rng)
    credit.WINDOW = rng.choice([1, 2, 3, 64])  # a small window shows deadlocks by back-pressure
    link = ShufflingLink(rng) if rng.random() < 0.6 else InProcessLink()
    runtime = GraphRuntime(plans, nodes, link=link)
    session = "s" if rng.random() < 0.1 else None
    inputs = {name: payload for name, payload in case.inputs.items() if name in plans[0].placeholders}
    call = runtime.open("c", inputs, case.outputs, graph=plans[0].name, deadline_s=DEADLINE_S, session=session)
    got, error, has_left = await read_all(rng, call)
    await spin()  # duplicates are still in flight on the link
    if has_left:
        assert error is None or isinstance(error, CallAborted), repr(error)
        counts["left"] += 1
    else:
        try:
            case.check(nodes, got, error)
            counts[case.expected.outcome.value] += 1
        except TooLarge:  # because the other group won
            counts["too large"] += 1
    assert runtime.statistics() == FlowStatistics(0, 0, 0, 0), runtime.statistics()
    assert asyncio.all_tasks() == {asyncio.current_task()}


def run_cases(first_seed, num_cases):
    """Run cases in this process; returns the number of cases by outcome."""
    counts = Counter()
    logging.disable(logging.WARNING)  # of nodes that raise in calls that continue
    with asyncio.Runner() as runner:

        @seed(first_seed)
        @settings(
            max_examples=num_cases,
            deadline=None,
            database=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(st.integers(0, 2**48))
        def run(number):
            try:
                runner.run(run_case(number, counts))
            except Exception as exc:
                raise AssertionError(f"FUZZ_SEED={number}: {exc!r}") from exc

        run()
    return counts


@pytest.mark.fuzz
@pytest.mark.timeout(0)
def test_random_graphs_do_what_the_reference_does_and_leave_nothing(capsys):
    if ONLY_SEED is not None:
        with asyncio.Runner() as runner:
            runner.run(run_case(ONLY_SEED, Counter()))
        return
    first_seed = seeds(FULL_SIZE).start
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(NUM_PROCESSES, mp_context=spawn) as pool:
        parts = [first_seed + number for number in range(NUM_PROCESSES)]
        counts = sum(pool.map(run_cases, parts, [NUM_CASES // NUM_PROCESSES] * NUM_PROCESSES), Counter())
    with capsys.disabled():
        print(f"\nrandom graphs: seeds {parts}, {sum(counts.values())} cases: {dict(counts)}")
    assert sum(counts.values()) >= NUM_CASES
    assert counts["rejected"] <= 0.1 * NUM_CASES
