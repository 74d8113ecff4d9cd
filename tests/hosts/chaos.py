"""Random faults of a deployment on several hosts, and requests that run meanwhile."""

import asyncio
import os
import random
import re
import signal
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import aclosing, suppress
from dataclasses import asdict, dataclass, field
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import psutil
import torch

from tests.hosts.deployments import PROMPT, Deployment
from tests.hosts.machines import Host
from vllm_omni.engine.replicas import ReplicaGroup
from vllm_omni.errors import CallAborted, DeadlineExceeded, InvalidRequest, StageFailed
from vllm_omni.process.status import StageState

ORPHAN_S = 5.0  # VLLM_OMNI_ORPHAN_S of the hosts
GLITCH_S = (0.1, 1.5)  # a host that is cut off for so long is not lost
CUT_S = (2.5, ORPHAN_S)  # one that continues
LOST_S = (ORPHAN_S, ORPHAN_S + 3.0)  # one that may end, and is then started again; 6 s are too long for relays
DOWN_S = (0.0, 2.0)  # before a killed host is started again
DRAINED_S = (0.2, 2.0)
PAUSE_S = (0.0, 1.0)  # between two events of which the second one does not wait for the recovery from the first
RECOVERS = 0.3  # how likely an event is that the next one waits for
RECOVERY_S = 150.0  # 12 s, on a machine that is busy with other tests
NOTICED_S = 2.5  # after which a host that is silent is lost
REQUEST_S = 60.0  # likewise, 4 s
IDLE_S = 20.0
RESTARTS = {"VLLM_OMNI_STAGE_RESTARTS": "1000", "VLLM_OMNI_STAGE_RESTART_WINDOW_S": "3"}
POLL_S = 0.05
THOUGHT_S = 0.2  # at most, before the next request of a client
FAILED_S = 0.5  # the same after a failure: without a stage, requests fail at once
NUM_CLIENTS = 4
LOCAL = "token2wav"  # the stage beside the front end, which has as many replicas as an event says
MAX_LOCAL = 2
ON_HOSTS = ("thinker", "talker/0", "talker/1")  # engines, each on a host of its own
TALKERS = ON_HOSTS[1:]
STAGES = ("thinker", "talker", "token2wav")  # each on a host of its own, with its controller


# -- the schedule ------------------------------------------------------------------------------------------------------


class Event(NamedTuple):
    """A fault, and how long it lasts."""

    kind: str
    target: str  # an engine, whose host it may be
    lasts_s: float
    pause_s: float | None  # before the next event; None: it waits until everything has recovered

    def __str__(self) -> str:
        then = "then recover" if self.pause_s is None else f"then {self.pause_s:.1f} s"
        return f"{self.kind} {self.target} for {self.lasts_s:.1f} s, {then}"


Faults: TypeAlias = dict[str, tuple[int, Sequence[str], tuple[float, float]]]
"""Kind -> its weight, its targets, how long it lasts."""


def _of_hosts(engines: Sequence[str]) -> Faults:
    return {
        "kill host": (3, engines, DOWN_S),
        "cut host, a moment": (2, engines, GLITCH_S),
        "cut host": (2, engines, CUT_S),
        "cut host, long": (1, engines, LOST_S),
    }


WITH_REPLICAS: Faults = {
    "kill engine": (5, (*ON_HOSTS, f"{LOCAL}/0"), (0.0, 0.0)),
    **_of_hosts(ON_HOSTS),
    "drain": (2, TALKERS, DRAINED_S),
    "scale": (2, (LOCAL,), (0.0, 0.0)),
}
WITH_CONTROLLERS: Faults = {
    "kill engine": (5, STAGES, (0.0, 0.0)),
    **_of_hosts(STAGES),
    "part hosts": (2, STAGES, CUT_S),  # a host and the next one
}


def make_events(seed: int, number: int, faults: Faults = WITH_REPLICAS) -> Iterator[Event]:
    """The events of a seed; a shorter schedule is the start of a longer one.

    What an event has hit is hit by no other one before everything has recovered.
    """
    rng = random.Random(seed)
    num_targets = len({target for _, targets, _ in faults.values() for target in targets})
    hit: set[str] = set()
    for _ in range(number):
        weights = {
            (kind, target): weight / len(targets)
            for kind, (weight, targets, _) in faults.items()
            for target in targets
            if target not in hit
        }
        kind, target = rng.choices(list(weights), list(weights.values()))[0]
        hit.add(target)
        recovers = rng.random() < RECOVERS or len(hit) == num_targets
        lasts_s, pause_s = rng.uniform(*faults[kind][2]), rng.uniform(*PAUSE_S)
        if recovers:
            hit.clear()
        yield Event(kind, target, lasts_s, None if recovers else pause_s)


# -- requests ----------------------------------------------------------------------------------------------------------


class Question(NamedTuple):
    number: int  # of its prompt
    modalities: tuple[str, ...]
    num_tokens: int
    num_codes: int = 0


QUESTIONS = (
    Question(0, ("text",), 4),
    Question(1, ("text",), 120),
    Question(2, ("text", "audio"), 8, 12),
    Question(3, ("text", "audio"), 24, 40),
    Question(4, ("text", "audio"), 100, 60),
)


@dataclass
class Reply:
    """What the user has received of a request."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    pieces: list[torch.Tensor] = field(default_factory=list)
    has_finished: bool = False

    @property
    def audio(self) -> torch.Tensor:
        return torch.cat(self.pieces) if self.pieces else torch.zeros(0)

    def check(self, alone: "Reply") -> None:
        """Check that it is the start of the lone answer, or all of it if it has finished: nothing came twice."""
        if self.has_finished:
            assert (self.token_ids, self.text) == (alone.token_ids, alone.text)
            assert len(self.audio) == len(alone.audio)
        assert self.token_ids == alone.token_ids[: len(self.token_ids)]
        assert alone.text.startswith(self.text)
        assert len(self.audio) <= len(alone.audio)
        if len(self.audio):  # its samples depend on what else is in a batch, by the order of sums
            largest = float(alone.audio.abs().max())
            torch.testing.assert_close(self.audio, alone.audio[: len(self.audio)], rtol=0, atol=1e-4 * largest)


class Load:
    """Clients that ask one request after the other, with short pauses.

    Attributes:
        counts: how many requests ended in which way.
    """

    def __init__(self, deployment: Deployment, seed: int, alone: dict[Question, Reply]) -> None:
        self._deployment, self._seed, self._alone = deployment, seed, alone
        self._is_over = False
        self.counts: Counter[str] = Counter()

    def stop(self) -> None:
        self._is_over = True

    async def client(self, client: int) -> None:
        rng = random.Random(f"{self._seed}-{client}")
        for number in count():
            if self._is_over:
                return
            question = rng.choice(QUESTIONS)
            request_id = f"chaos-{self._seed}-{client}-{number}"
            asking = asyncio.create_task(self._ask(question, request_id, rng))
            try:  # a request that does not end may not end by being cancelled, either
                await asyncio.wait((asking,), timeout=REQUEST_S)
                assert asking.done(), f"{request_id} ({question}) did not end in {REQUEST_S:g} s: {stack_of(asking)}"
                outcome = await asking
            finally:
                asking.cancel()
            self.counts[outcome] += 1
            await asyncio.sleep(FAILED_S if outcome == "failed" else rng.uniform(0.0, THOUGHT_S))

    async def _ask(self, question: Question, request_id: str, rng: random.Random) -> str:
        """One request, which some clients leave, abort, or give a deadline; returns how it ended."""
        way = rng.choices(("read", "leave", "abort", "deadline"), (12, 1, 1, 1))[0]
        most, after_s = rng.randrange(1, 12), rng.uniform(0.0, 1.0)
        reply, engine = Reply(), self._deployment.omni.engine
        aborting = asyncio.create_task(_after(after_s, lambda: engine.abort(request_id))) if way == "abort" else None
        limit = {"deadline_s": after_s + 0.01} if way == "deadline" else {}
        try:
            await receive(self._deployment, question, reply, most if way == "leave" else None, request_id, **limit)
            outcome = "answered" if reply.has_finished else "left"
        except (CallAborted, DeadlineExceeded) as exc:
            assert isinstance(exc, CallAborted if way == "abort" else DeadlineExceeded), f"{request_id}: {exc!r}"
            outcome = way
        except StageFailed as exc:
            assert exc.stage.partition("/")[0] in ("thinker", "talker", "token2wav"), f"{request_id}: {exc!r}"
            assert exc.stage in str(exc)
            outcome = "failed"
        finally:
            if aborting is not None:
                aborting.cancel()
        assert outcome != "left" or way == "leave", f"request {request_id} ended without an end"
        try:
            reply.check(self._alone[question])
        except AssertionError as exc:
            raise AssertionError(f"request {request_id} ({question}, {outcome}): {exc}") from exc
        return outcome


def stack_of(task: asyncio.Task[Any]) -> str:
    """Where a task waits, from its outermost call to the innermost one."""
    lines: list[str] = []
    awaited: Any = task.get_coro()
    while awaited is not None:
        kind = next((one for one in ("cr", "ag", "gi") if hasattr(awaited, f"{one}_frame")), None)
        frame = kind and getattr(awaited, f"{kind}_frame")
        lines.append(f"{frame.f_code.co_filename}:{frame.f_lineno} {frame.f_code.co_name}" if frame else repr(awaited))
        awaited = getattr(awaited, "gi_yieldfrom" if kind == "gi" else f"{kind}_await") if kind else None
    return "\n".join(lines)


async def _after(delay_s: float, call: Callable[[], Awaitable[object]]) -> None:
    await asyncio.sleep(delay_s)
    await call()


async def receive(
    deployment: Deployment,
    question: Question,
    reply: Reply,
    most: int | None = None,
    request_id: str | None = None,
    **more: Any,
) -> None:
    """Read a request's outputs into ``reply``, until their end or until there were ``most`` of them."""
    params = {
        "thinker": {"temperature": 0.0, "max_tokens": question.num_tokens, "ignore_eos": True},
        "talker": {"temperature": 0.0, "max_tokens": question.num_codes or 1},
        "token2wav": {"seed": 0},
    }
    prompt = PROMPT.format(question.number)
    outputs = deployment.omni.engine.generate(prompt, params, request_id, modalities=question.modalities, **more)
    async with aclosing(outputs):
        async for output in outputs:
            assert not reply.has_finished, "an output behind the last one"
            for completion in output.outputs:
                reply.text += completion.text
                reply.token_ids += completion.token_ids
            if "audio" in output.multimodal_output:
                reply.pieces.append(output.multimodal_output["audio"])
            reply.has_finished = output.finished
            most = None if most is None else most - 1
            if most == 0 and not output.finished:
                return
    assert reply.has_finished, "the outputs ended without a last one"


async def answer_alone(deployment: Deployment) -> dict[Question, Reply]:
    """Each question while no other one is answered."""
    replies = {question: Reply() for question in QUESTIONS}
    for question, reply in replies.items():
        async with asyncio.timeout(REQUEST_S):
            await receive(deployment, question, reply)
        assert bool(len(reply.audio)) == ("audio" in question.modalities)
    return replies


# -- faults ------------------------------------------------------------------------------------------------------------


class Chaos:
    """Makes events happen to a deployment, and mends it.

    Attributes:
        past: the events so far.
    """

    def __init__(self, deployment: Deployment) -> None:
        self._deployment = deployment
        self._engine = deployment.omni.engine
        self._mending: list[asyncio.Task[None]] = []
        self._down: set[str] = set()  # engines whose hosts are not to be started now
        self.past: list[Event] = []
        self._started_at = time.monotonic()

    async def run(self, events: Iterator[Event]) -> None:
        """Let all events happen, and everything recover."""
        keeping = asyncio.create_task(self._keep_hosts())
        try:
            for event in events:
                self.past.append(event)
                self._say(event)
                self._mending.append(asyncio.create_task(self._happen(event)))
                if event.pause_s is None:
                    await self.recover()
                else:
                    await asyncio.sleep(event.pause_s)
            await self.recover()
        finally:
            for task in (keeping, *self._mending):
                task.cancel()
            ended = await asyncio.gather(keeping, *self._mending, return_exceptions=True)
        for error in ended:
            if isinstance(error, Exception):
                raise error

    async def recover(self) -> None:
        """Wait until what happened is mended, and all engines run."""
        await asyncio.gather(*self._mending)
        self._mending.clear()
        await self._until("all stages run", self._all_run, RECOVERY_S)
        self._say("recovered")

    def _say(self, what: object) -> None:
        """Print what happens, for the report of a test that fails."""
        print(f"{time.monotonic() - self._started_at:6.1f} s: {what}", flush=True)

    def _all_run(self) -> bool:
        return {state for state, _ in self._states().values()} == {StageState.RUNNING}

    async def _until(self, what: str, is_true: Callable[[], object], timeout_s: float) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                while not is_true():  # noqa: ASYNC110 - nothing notifies of it
                    await asyncio.sleep(POLL_S)
        except TimeoutError:
            raise AssertionError(f"not within {timeout_s:g} s: {what}; {self._states()}") from None

    def _states(self) -> dict[str, tuple[StageState, str | None]]:
        return {name: (one.state, one.reason) for name, one in self._engine.stage_report().items()}

    async def _keep_hosts(self) -> None:
        """Start the program of a host again when it has ended."""
        while True:
            for engine, host in self._deployment.hosts.items():
                if engine not in self._down and host.has_ended():
                    self._say(f"start the host of {engine}")
                    self._deployment.join(engine)
            await asyncio.sleep(POLL_S)

    async def _happen(self, event: Event) -> None:
        target = event.target
        match event.kind:
            case "kill engine":
                await self._kill_engine(target)
            case "kill host":
                self._down.add(target)
                await asyncio.to_thread(self._deployment.hosts[target].kill)
                await asyncio.sleep(event.lasts_s)
                self._down.remove(target)
            case "cut host, a moment" | "cut host" | "cut host, long":
                await asyncio.to_thread(self._deployment.hosts[target].cut)
                await asyncio.sleep(event.lasts_s)
                await asyncio.to_thread(self._deployment.hosts[target].mend)
                await asyncio.sleep(NOTICED_S)  # that it was lost may be noticed only now
            case "part hosts":
                names = [*self._deployment.hosts]
                near = self._deployment.hosts[target]
                far = self._deployment.hosts[names[(names.index(target) + 1) % len(names)]]
                await asyncio.to_thread(near.part, far)
                await asyncio.sleep(event.lasts_s)
                await asyncio.to_thread(near.meet, far)
                await asyncio.sleep(NOTICED_S)
            case "drain":
                with suppress(InvalidRequest):  # the other talker does not run
                    await self._engine.drain(target, event.lasts_s)
                    await asyncio.sleep(event.lasts_s)
                self._engine.undrain(target)
            case "scale":
                scaling = self._engine.orchestrator.scaling
                now = next(one.target for one in scaling.report() if one.stage == target)
                with suppress(StageFailed):  # its first replica does not run
                    async with asyncio.timeout(RECOVERY_S):
                        await self._engine.scale(target, MAX_LOCAL + 1 - now, REQUEST_S)

    async def _kill_engine(self, name: str) -> None:
        num_restarts = self._engine.stage_report()[name].num_restarts
        await self._until(f"{name} has processes", self._engine.orchestrator.engines[name].pids, RECOVERY_S)
        pids = self._engine.orchestrator.engines[name].pids()
        if name in self._deployment.hosts:
            pids = [pid for pid in processes_of(self._deployment.hosts[name]) if pid_inside(pid) in pids]
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        await self._until(
            f"{name} is restarted", lambda: self._engine.stage_report()[name].num_restarts > num_restarts, RECOVERY_S
        )


# -- what is left ------------------------------------------------------------------------------------------------------


def processes_of(host: Host) -> list[int]:
    """Ids of a host's processes, as this one sees them."""
    programs = [psutil.Process(program.pid) for program in host.running()]
    return [process.pid for program in programs for process in program.children(recursive=True)]


def pid_inside(pid: int) -> int | None:
    """The id of a process in its own namespace; None: it has ended."""
    with suppress(OSError, IndexError):
        return int(Path(f"/proc/{pid}/status").read_text().partition("NSpid:")[2].splitlines()[0].split()[-1])
    return None


def unused_shared_memory(host: Host) -> list[str]:
    """Files in a host's /dev/shm that none of its processes uses. A killed process leaves its semaphores to the
    tracker of its parent."""
    used, names = set[int](), dict[str, int]()
    for pid in processes_of(host):
        with suppress(OSError):  # it has just ended
            names |= {path.name: path.stat().st_ino for path in Path(f"/proc/{pid}/root/dev/shm").iterdir()}
            used |= set(map(int, re.findall(r" (\d+) +/dev/shm/", Path(f"/proc/{pid}/maps").read_text())))
            used |= {path.stat().st_ino for path in Path(f"/proc/{pid}/fd").iterdir() if _is_shared_memory(path)}
    return sorted(name for name, inode in names.items() if inode not in used and not name.startswith("sem."))


def _is_shared_memory(link: Path) -> bool:
    with suppress(OSError):
        return link.readlink().is_relative_to("/dev/shm")
    return False


async def held(deployment: Deployment) -> dict[str, Any]:
    """What requests have not released, in the front end, in engines and on hosts."""
    orchestrator = deployment.omni.engine.orchestrator
    found: dict[str, Any] = asdict(orchestrator.runtime.statistics())
    found["admitted"] = orchestrator.gate.admitted
    found["requests"] = orchestrator.requests._num_running
    found["streamed replies"] = len(orchestrator.streamed_replies)
    if orchestrator.controllers is not None:
        found["placed"] = [*orchestrator.controllers._placed, *orchestrator.controllers._running_on]
    found["limits"] = [stage for stage, (number, _) in orchestrator.queue_limits.num_open().items() if number]
    found["front end's leases"] = sum(one.num_leases for one in orchestrator.hub.statistics().values())
    for name, engine in orchestrator.engines.items():
        found[f"{name}: requests"] = engine.num_requests
        found[f"{name}: states"] = list(engine.llm.output_processor.request_states)
        found[f"{name}: notes"] = [*engine.llm.notes, *engine.llm.published]
        ranks = await engine.relay_statistics()
        found[f"{name}: leases"] = sum(one["num_leases"] for rank in ranks for one in rank.values())
        found[f"{name}: runs a request"] = not await is_idle(engine)
    for stage, node in orchestrator.nodes.items():
        if isinstance(node, ReplicaGroup):
            found[f"{stage}: work"] = sum(node.router.statistics().work.values())
            found[f"{stage}: assignments"] = sum(node.router.num_open(name) for name in node.engines)
    for name, host in deployment.hosts.items():
        found[f"{name}: /dev/shm"] = unused_shared_memory(host)
    return {name: value for name, value in found.items() if value}


async def is_idle(engine: Any) -> bool:
    """Whether an engine core has no request."""
    core = engine.llm.engine_core
    try:
        await engine.ask(core.pause_scheduler_async("wait", False), 1.0)
        return True
    except StageFailed:
        return False
    finally:
        await engine.ask(core.resume_scheduler_async())
