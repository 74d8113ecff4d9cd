"""What a host asks of an engine that continues for its front end (on real hosts: tests/hosts)."""

import inspect
import threading
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.engine import EngineCoreOutputs, EngineCoreRequestType, UtilityOutput
from vllm.v1.engine.core import EngineCoreProc
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder, UtilityResult

from vllm_omni.engine.hosted_engine import LAST_CALL, HostedEngine, _calls
from vllm_omni.hosts import messages as msg
from vllm_omni.model_executor.generation_executor import GenerationExecutor
from vllm_omni.relay.hub import INLINE_BYTES, RelayHub, RelayOptions
from vllm_omni.worker.cpu_worker import CPUARWorker
from vllm_omni.worker.diffusion_worker import DiffusionWorker

CALLS = [MsgpackDecoder().decode(frames) for _, *frames in _calls()]  # (client, number, method, arguments)


def test_an_engine_core_has_the_calls_with_which_it_forgets_its_requests() -> None:
    assert {frames[0] for frames in _calls()} == {EngineCoreRequestType.UTILITY.value}
    assert [number for _, number, *_ in CALLS] == [*range(1, LAST_CALL + 1)]
    for _, _, method, args in CALLS:
        inspect.signature(getattr(EngineCoreProc, method)).bind(None, *args)


@pytest.fixture
def hub() -> Iterator[RelayHub]:
    made = RelayHub(RelayOptions("shm", 1 << 20), prefault=False)
    made.put("request", torch.zeros(INLINE_BYTES))
    assert made.statistics()["shm"].num_leases == 1
    yield made
    made.close()


@pytest.mark.parametrize("worker", [CPUARWorker, DiffusionWorker])
def test_a_worker_takes_back_what_it_has_published(worker: Any, hub: RelayHub) -> None:
    (method,) = [args[0] for _, _, call, args in CALLS if call == "collective_rpc"]
    made = worker.__new__(worker)
    made.model_runner = SimpleNamespace(hub=hub)
    getattr(made, method)()
    assert hub.statistics()["shm"].num_leases == 0


def test_an_executor_without_workers_takes_back_what_it_has_published(hub: RelayHub) -> None:
    (args,) = [args for _, _, call, args in CALLS if call == "collective_rpc"]
    executor = GenerationExecutor.__new__(GenerationExecutor)
    executor.hub = hub
    executor.collective_rpc(*args)
    assert hub.statistics()["shm"].num_leases == 0


@pytest.mark.parametrize("order", [range(1, LAST_CALL + 1), [*range(2, LAST_CALL + 1), 1], [1, 3, LAST_CALL]])
def test_an_engine_continues_once_all_calls_are_answered(order: Sequence[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """With a step under way, the answer to the first comes last; the front end's client knows none of them."""
    monkeypatch.setattr("vllm_omni.engine.hosted_engine.CONTINUE_TIMEOUT_S", 0.2)
    handed_over: list[tuple[int, int]] = []

    def ask(number: int, calls: object, take: Any) -> bool:
        for one in order:
            outputs = EngineCoreOutputs(utility_output=UtilityOutput(one, result=UtilityResult(False)))
            take(MsgpackEncoder().encode(outputs))
        return True

    engine: Any = HostedEngine.__new__(HostedEngine)
    engine.name, engine._number = "thinker", 7
    engine._thread = SimpleNamespace(is_alive=lambda: True)
    engine._start = SimpleNamespace(options=None, log_stats=False)
    engine._connection = SimpleNamespace(ask_engine=ask, continue_as=lambda *numbers: handed_over.append(numbers))
    start = SimpleNamespace(options=None, log_stats=False, number=8, node=None)
    assert engine._continues(start) == (len(order) == LAST_CALL)
    assert handed_over == ([(7, 8)] if len(order) == LAST_CALL else [])


def test_a_part_of_an_engine_on_several_hosts_does_not_continue() -> None:
    engine: Any = HostedEngine.__new__(HostedEngine)
    start = SimpleNamespace(options=None, log_stats=False, number=8, node=msg.Node(0, "127.0.0.1", 1))
    engine._start, engine._thread = start, SimpleNamespace(is_alive=lambda: True)
    assert not engine._continues(start)


def test_the_end_of_an_engine_is_reported_though_it_cannot_be_cleared_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """Upstream's shutdown fails if the process ends just before it is killed."""

    def fail(*args: object, **more: object) -> None:
        raise ProcessLookupError("it has just ended")

    sent: list[object] = []
    engine: Any = HostedEngine.__new__(HostedEngine)
    engine.name, engine._number = "thinker", 7
    engine._connection = SimpleNamespace(close_bridge=fail, send=sent.append)
    engine._engine, engine._controllers = None, SimpleNamespace(detach=fail)
    engine._processes = SimpleNamespace(end=fail, note=lambda: None)
    monkeypatch.setattr(engine, "_launch", lambda start: SimpleNamespace(shutdown=fail))
    monkeypatch.setattr(engine, "_watch", lambda manager, ending: "killed by SIGKILL")
    engine._run(None, threading.Event(), threading.Event())
    assert sent == [msg.Ended(7, "killed by SIGKILL")]
