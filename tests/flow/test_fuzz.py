"""Random trees, random nodes, random links, random ends: whatever happens, order holds and nothing is left."""

import asyncio
import os
import random
import time

import pytest

from tests.flow.builders import FunctionNode, ShufflingLink, spin
from vllm_omni.errors import CallAborted
from vllm_omni.flow import (
    Chunk,
    Emission,
    EndReason,
    Field,
    FlowStatistics,
    Graph,
    GraphParser,
    GraphRuntime,
    InProcessLink,
    Role,
    interface,
)

FUZZ_SECONDS = float(os.environ.get("FUZZ_SECONDS", "1"))


class Worker(Role):
    run = interface(
        inputs_or=[["x"]], outputs={"left": Field("text", streamed=True), "right": Field("text", streamed=True)}
    )


class Broken(Exception):
    pass


def make_world(rng):
    """A tree in which each node sends on what it reads, `left` as it is and `right` with its name in front."""
    fails = rng.random() < 0.3

    def make_node(name):
        async def forward(activation):
            async for chunk in activation.inputs["x"]:
                for _ in range(rng.randrange(3)):
                    await asyncio.sleep(0)
                if fails and rng.random() < 0.1:
                    raise Broken(name)
                ends = chunk.last and rng.random() < 0.7
                yield Emission("left", chunk.payload, ends)
                yield Emission("right", f"{name}{chunk.payload}", ends)

        return FunctionNode(forward)

    num_pieces = rng.randrange(5)

    async def split(chunks, call):
        async for chunk in chunks:
            for piece in range(num_pieces):
                if rng.random() < 0.3:
                    await asyncio.sleep(0)
                yield Chunk(f"{chunk.payload}{piece}")

    graph = Graph("random")
    expected = {}
    sources = [(graph.placeholder("x").via(split), [f"-{piece}" for piece in range(num_pieces)])]
    names = [f"n{i}" for i in range(rng.randint(1, 7))]
    for name in names:
        # Only the root reads the placeholder; the others hang below any field made so far.
        source, payloads = sources[0] if name == "n0" else rng.choice(sources[1:])
        reply = graph.role(Worker, name).run(x=source)
        sources += [(reply.left, payloads), (reply.right, [name + payload for payload in payloads])]
        graph.output(**{f"{name}_left": reply.left, f"{name}_right": reply.right})
        expected |= {f"{name}_left": payloads, f"{name}_right": sources[-1][1]}
    link = ShufflingLink(rng) if rng.random() < 0.5 else InProcessLink()
    nodes = {name: make_node(name) for name in names}
    return GraphRuntime(GraphParser(graph).parse(), nodes, link=link), nodes, expected


async def read_and_maybe_leave(rng, call, num_frames):
    """Payloads per output, and whether they are all."""
    got = {}
    leave_after = rng.randrange(num_frames + 1) if rng.random() < 0.4 else None
    try:
        async for frame in call:
            if frame.reason is EndReason.NONE:
                got.setdefault(frame.field, []).append(frame.payload)
            for _ in range(rng.randrange(2)):
                await asyncio.sleep(0)
            if leave_after is not None:
                leave_after -= 1
                if leave_after < 0:
                    await (call.abort() if rng.random() < 0.5 else call.aclose())
                    return got, False
    except (Broken, CallAborted):
        return got, False
    return got, True


@pytest.mark.fuzz
async def test_random_trees_keep_order_and_leave_nothing():
    end, seed = time.monotonic() + FUZZ_SECONDS, 0
    complete = 0
    while time.monotonic() < end or seed < 50:
        rng = random.Random(seed)
        before = asyncio.all_tasks()
        runtime, nodes, expected = make_world(rng)
        outputs = [set(rng.sample(sorted(expected), rng.randint(1, len(expected)))) for _ in range(rng.randint(1, 4))]
        calls = [runtime.open(f"c{i}", {"x": "-"}, wanted) for i, wanted in enumerate(outputs)]
        num_frames = sum(map(len, expected.values()))
        answers = await asyncio.gather(*(read_and_maybe_leave(rng, call, num_frames) for call in calls))
        await spin()  # duplicates still under way on the link

        for wanted, (got, is_complete) in zip(outputs, answers, strict=True):
            for name in wanted:
                payloads = got.get(name, [])
                assert payloads == expected[name][: len(payloads)], f"seed {seed}, output {name}"
                assert not is_complete or len(payloads) == len(expected[name]), f"seed {seed}, output {name}"
            assert set(got) <= wanted, f"seed {seed}"
            complete += is_complete
        assert runtime.statistics() == FlowStatistics(0, 0, 0, 0), f"seed {seed}"
        assert asyncio.all_tasks() == before, f"seed {seed}"
        assert all(node.events.count("start") == node.events.count("clean") for node in nodes.values()), f"seed {seed}"
        seed += 1
    assert complete > 0
