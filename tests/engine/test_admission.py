"""The admission gate before the first stage."""

import asyncio

import pytest

from vllm_omni.engine.admission import AdmissionGate


async def test_a_closed_gate_holds_new_requests_and_not_admitted_ones() -> None:
    gate = AdmissionGate()
    await gate.enter("before")
    gate.close()
    await gate.enter("before")  # its second chunk
    late = asyncio.create_task(gate.enter("late"))
    await asyncio.sleep(0)
    assert not late.done()
    assert gate.admitted == {"before"}
    gate.open()
    await late
    assert gate.admitted == {"before", "late"}


async def test_the_gate_is_empty_when_the_last_request_has_left() -> None:
    gate = AdmissionGate()
    await gate.wait_until_empty()
    await gate.enter("one")
    await gate.enter("two")
    gate.close()
    emptied = asyncio.create_task(gate.wait_until_empty())
    for request_id in ("not admitted", "one"):
        gate.leave(request_id)
        await asyncio.sleep(0)
        assert not emptied.done()
    gate.leave("two")
    await emptied


async def test_a_request_cancelled_at_the_gate_was_not_admitted() -> None:
    gate = AdmissionGate()
    gate.close()
    waiting = asyncio.create_task(gate.enter("one"))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    gate.open()
    assert gate.admitted == set()


async def test_a_gate_that_closes_again_at_once_admits_nobody() -> None:
    gate = AdmissionGate()
    gate.close()
    waiting = asyncio.ensure_future(gate.enter("request"))
    await asyncio.sleep(0)
    gate.open()
    gate.close()
    for _ in range(3):
        await asyncio.sleep(0)
    assert not gate.admitted
    gate.open()
    await waiting
    assert gate.admitted == {"request"}
