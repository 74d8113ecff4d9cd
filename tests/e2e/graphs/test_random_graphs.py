"""Random graphs over tiny engines against the reference interpreter, while replicas die, readers leave, and readers are
slow: every answer is that of the engines called by hand, and nothing is left.

All graphs of a batch are graphs of one pipeline, whose calls share its engines: a language model and a generation
stage, two replicas of each, and a function. A failing case prints its seed and its graph (``tests/fuzz.py``).
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections import Counter, defaultdict
from collections.abc import Sequence
from contextlib import aclosing, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from vllm.model_executor.models.registry import ModelRegistry

from tests.e2e.engines import MARKS
from tests.e2e.graphs.random_pipelines import (
    CODER,
    NUM_TOKENS,
    WRITER,
    Answers,
    Coder,
    ServedCase,
    TooClose,
    Writer,
    make_pipeline,
    serve_case,
)
from tests.encoded_link import served_from_bytes
from tests.engine_threads import Crashed, Killed, engine_threads, thread_of
from tests.flow.random_graphs import NodeBroke, make_case
from tests.flow.reference import TooLarge
from tests.fuzz import seeds
from tests.reference import llama
from vllm_omni.engine import reading
from vllm_omni.engine.replicas import ReplicaGroup
from vllm_omni.entrypoints.async_omni import AsyncOmni
from vllm_omni.errors import DeadlineExceeded, GraphError, StageFailed, StageUnavailable
from vllm_omni.flow.run import credit
from vllm_omni.process.status import StageState

pytestmark = [*MARKS, pytest.mark.timeout(0)]

FULL_SIZE = 200
BATCH_SIZE = 200
NUM_AT_ONCE = 8
RELAY_BYTES = 4 << 20
DEADLINE_S = 60.0
IDLE_TIMEOUT_S = 60.0
STAGES = ("writer", "coder")
LEAVES = ("closes", "aborts", "cancelled", "deadline")
LOST = ("after the request's first output", "restarting: ", "no replica admits requests", "RelayBroken", "RelayTimeout")
"""Why a request may fail when a replica dies: all others run again, and nobody notices."""
PARAMS = {"writer": {"temperature": 0.0, "max_tokens": NUM_TOKENS, "ignore_eos": True, "detokenize": False}}


class Batch:
    """Calls of the graphs of one pipeline."""

    def __init__(self, omni: AsyncOmni, rng: random.Random) -> None:
        self.omni = omni
        self.rng = rng
        self.counts: Counter[str] = Counter()
        self._room = asyncio.Semaphore(NUM_AT_ONCE)

    async def run(self, cases: Sequence[ServedCase]) -> None:
        disturbing = asyncio.create_task(self._disturb())
        try:
            async with asyncio.TaskGroup() as calls:
                for served in cases:
                    calls.create_task(self._call(served))
        finally:
            disturbing.cancel()
        await self._check_idle(cases)

    async def _disturb(self) -> None:
        """Kill or drain a replica now and then, while the other one of its stage runs, or pause everything."""
        while True:
            await asyncio.sleep(self.rng.uniform(0.1, 0.8))
            orchestrator = self.omni.orchestrator
            engines = orchestrator.engines_of(self.rng.choice(STAGES))
            if any(one.current_status().state is not StageState.RUNNING for one in orchestrator.engines.values()):
                continue
            engine = self.rng.choice([one for one in engines if one.num_requests] or engines)
            kind = self.rng.choice(("kills", "kills", "kills", "drains", "pauses"))
            self.counts[kind] += 1
            if kind == "kills":
                thread = thread_of(engine)
                thread.kill(self.rng.choice([Killed(), Crashed("by the test")]))
                await asyncio.to_thread(thread.join)  # it may wait for the start of another
            elif kind == "drains":
                await self._drain(engine.name)
            else:
                await self._pause()

    async def _drain(self, engine: str) -> None:
        try:
            await self.omni.drain(engine, self.rng.random())
        finally:
            self.omni.undrain(engine)

    async def _pause(self) -> None:
        try:
            await self.omni.pause_generation(mode="keep", clear_cache=self.rng.random() < 0.5)
            await asyncio.sleep(self.rng.random() * 0.1)
        finally:
            await self.omni.resume_generation()

    async def _call(self, served: ServedCase) -> None:
        async with self._room:
            try:
                await self._check(served, *await self._read(served))
            except Exception as exc:
                raise AssertionError(f"FUZZ_SEED={served.number}: {exc!r}") from exc

    async def _read(self, served: ServedCase) -> tuple[dict[str, list[str]], Exception | None, bool]:
        """The payloads of each output, the error that ended the call, and whether the reader left early."""
        rng, case = random.Random(served.number), served.case
        leaves = rng.choice(LEAVES) if rng.random() < 0.25 else None
        leave_after, leave_after_s = rng.randrange(12), rng.random() * 0.5
        slow_s = rng.random() * 0.02 if rng.random() < 0.3 else 0.0
        got: dict[str, list[str]] = defaultdict(list)
        outputs = self.omni.generate(
            case.inputs,
            PARAMS,
            served.name,
            graph=served.name,
            modalities=[served.output_of(name) for name in sorted(case.outputs)],
            deadline_s=leave_after_s if leaves == "deadline" else DEADLINE_S,
            **({"session_id": "s"} if rng.random() < 0.1 else {}),
        )
        try:
            async with asyncio.timeout(leave_after_s if leaves == "cancelled" else None), aclosing(outputs):
                async for output in outputs:
                    for text in output.multimodal_output.values():
                        if isinstance(text, str) and text:
                            role, rest = text.split(".", 1)
                            got[f"{role}_{rest[0]}"].append(text)
                    await asyncio.sleep(slow_s)
                    if not leave_after and leaves in ("closes", "aborts"):
                        if leaves == "aborts":
                            await self.omni.abort(served.name)
                        return got, None, True
                    leave_after -= 1
        except TimeoutError as exc:
            return got, exc, leaves == ("deadline" if isinstance(exc, DeadlineExceeded) else "cancelled")
        except Exception as exc:
            return got, exc, False
        return got, None, False

    async def _check(
        self, served: ServedCase, got: dict[str, list[str]], error: Exception | None, has_left: bool
    ) -> None:
        assert not any(node.held for node in served.nodes.values()), served.case
        self.counts["pulls"] += sum(node.num_pulls for node in served.nodes.values())
        if has_left:
            self.counts["left"] += 1
        elif failures := self._failures(served, error):
            assert error is None or isinstance(error, StageFailed | StageUnavailable), repr(error)
            for reason in failures:
                assert any(known in reason for known in LOST), reason
                self.counts[next(f"lost: {known}" for known in LOST if known in reason)] += 1
        else:
            if isinstance(error, StageFailed) and "NodeBroke" in str(error):
                error = NodeBroke()
            try:
                served.case.check(served.nodes, got, error)
                self.counts[served.case.expected.outcome.value] += 1
            except (TooLarge, TooClose) as exc:  # because the other group won
                self.counts[type(exc).__name__] += 1

    def _failures(self, served: ServedCase, error: Exception | None) -> list[str]:
        """Why the call has lost an engine, if it has: before it began, or in an activation."""
        before = [str(error)] if isinstance(error, StageUnavailable) else []
        return before + [reason for node in served.nodes.values() for reason in node.failures]

    async def _check_idle(self, cases: Sequence[ServedCase]) -> None:
        async with asyncio.timeout(IDLE_TIMEOUT_S + DEADLINE_S):  # an engine may be starting again
            engines = self.omni.orchestrator.engines.values()
            while any(one.current_status().state is not StageState.RUNNING for one in engines):  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        try:
            async with asyncio.timeout(IDLE_TIMEOUT_S):
                while self._held():  # noqa: ASYNC110 - it is not told of it
                    await asyncio.sleep(0.02)
        except TimeoutError:
            raise AssertionError(f"left behind: {self._held()}") from None

    def _held(self) -> dict[str, Any]:
        """What calls have not released."""
        orchestrator = self.omni.orchestrator
        held: dict[str, Any] = asdict(orchestrator.runtime.statistics())
        held["admitted"] = orchestrator.gate.admitted
        held["front leases"] = sum(one.num_leases for one in orchestrator.hub.statistics().values())
        for name, engine in orchestrator.engines.items():
            core = thread_of(engine).core
            assert core is not None and core.hub is not None
            held[f"{name} requests"] = engine.num_requests
            held[f"{name} scheduled"] = list(core.scheduler.requests)  # type: ignore[attr-defined]
            held[f"{name} states"] = list(engine.llm.output_processor.request_states)
            held[f"{name} notes"] = list(engine.llm.notes) + list(engine.llm.published)
            held[f"{name} leases"] = sum(one.num_leases for one in core.hub.statistics().values())
        for name in STAGES:
            group = orchestrator.nodes[name]
            assert isinstance(group, ReplicaGroup)
            held[f"{name} work"] = sum(group.router.statistics().work.values())
        return {name: value for name, value in held.items() if value}


def make_cases(numbers: Sequence[int], answers: Answers, counts: Counter[str]) -> list[ServedCase]:
    cases = []
    for number in numbers:
        rng = random.Random(number)
        try:
            cases.append(serve_case(number, make_case(rng), answers, rng))
        except GraphError:
            counts["rejected"] += 1
        except TooClose:
            counts["too close"] += 1
    return cases


def run_batch(numbers: Sequence[int], checkpoint: Path, answers: Answers) -> Counter[str]:
    counts: Counter[str] = Counter()
    cases = make_cases(numbers, answers, counts)
    rng = random.Random(numbers[0])
    credit.WINDOW = rng.choice([1, 2, 3, 64])
    reading.TOKENS_AHEAD = rng.choice([1, 2, 5, 256])
    with engine_threads(), asyncio.Runner() as runner:
        omni = AsyncOmni(str(checkpoint), pipeline=make_pipeline(cases))
        batch = Batch(omni, rng)
        try:
            with served_from_bytes(omni.orchestrator) if numbers[0] // BATCH_SIZE % 2 else nullcontext():
                runner.run(batch.run(cases))
        finally:
            omni.shutdown()
    return counts + batch.counts


@pytest.mark.fuzz
def test_random_graphs_on_engines_do_what_the_reference_does_and_leave_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ModelRegistry.register_model(WRITER, Writer)
    ModelRegistry.register_model(CODER, Coder)
    monkeypatch.setattr(credit, "WINDOW", credit.WINDOW)
    monkeypatch.setattr(reading, "TOKENS_AHEAD", reading.TOKENS_AHEAD)
    monkeypatch.setenv("VLLM_OMNI_RELAY_BYTES", str(RELAY_BYTES))
    logging.disable(logging.ERROR)  # of nodes that raise, and engines that die
    try:
        checkpoint = llama.build(tmp_path)
        answers, counts = Answers(checkpoint), Counter[str]()
        numbers = seeds(FULL_SIZE)
        for first in range(0, len(numbers), BATCH_SIZE):
            counts += run_batch(numbers[first : first + BATCH_SIZE], checkpoint, answers)
    finally:
        logging.disable(logging.NOTSET)
    with capsys.disabled():
        print(f"\nrandom graphs on engines: seeds {numbers}: {dict(counts)}")
    if len(numbers) > 1:
        num_lost = sum(count for name, count in counts.items() if name.startswith("lost: "))  # more on a busy machine
        assert counts["done"] >= 0.5 * (len(numbers) - counts["left"] - num_lost) > 0
        assert counts["rejected"] + counts["too close"] <= max(2, 0.15 * len(numbers))
