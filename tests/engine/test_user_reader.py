"""A user that stops reading; with engines in ``tests/entrypoints/test_async_omni.py``."""

import asyncio

import pytest

from vllm_omni.engine.user_reader import UserAway
from vllm_omni.errors import CallAborted

TIMEOUT_S = 0.05


class Call:
    """Of which a test says what is unread, and what runs."""

    call_id = "call"

    def __init__(self, num_buffered: int, *running_nodes: str) -> None:
        self.num_buffered = num_buffered
        self.running_nodes = frozenset(running_nodes)
        self.stopped: list[Exception | None] = []

    def stop(self, error: Exception | None) -> None:
        self.stopped.append(error)


@pytest.fixture(autouse=True)
def short_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_OMNI_READER_TIMEOUT_S", str(TIMEOUT_S))


async def be_away(
    call: Call, time_s: float = 4 * TIMEOUT_S, *, then_s: float = 2 * TIMEOUT_S
) -> list[Exception | None]:
    with UserAway(call):  # type: ignore[arg-type]
        await asyncio.sleep(time_s)
    await asyncio.sleep(then_s)  # a timer that is still set would be seen
    return call.stopped


async def test_stages_that_wait_for_a_user_are_freed() -> None:
    (error,) = await be_away(Call(64, "thinker"))
    assert isinstance(error, CallAborted)
    assert str(error) == "call 'call' aborted: its outputs were not read for 0.05 s, and its stages waited for that"


@pytest.mark.parametrize("call", [Call(0, "thinker"), Call(64)], ids=["nothing is unread", "no stage runs"])
async def test_a_user_whom_no_stage_waits_for_may_take_its_time(call: Call) -> None:
    assert await be_away(call) == []


async def test_a_stage_that_comes_to_wait_later_is_freed_too() -> None:
    call = Call(0, "thinker")
    asyncio.get_running_loop().call_later(1.5 * TIMEOUT_S, setattr, call, "num_buffered", 64)
    assert len(await be_away(call)) == 1


async def test_a_user_who_asks_in_time_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    timeout_s = 20 * TIMEOUT_S  # longer than this process may have to wait for a core
    monkeypatch.setenv("VLLM_OMNI_READER_TIMEOUT_S", str(timeout_s))
    assert await be_away(Call(64, "thinker"), TIMEOUT_S, then_s=1.2 * timeout_s) == []
