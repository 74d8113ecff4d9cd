"""``Deadline``: the end of a request's time, whatever it waits for."""

import asyncio
import time
from typing import Any

import pytest

from tests.cases import rejected
from vllm_omni.entrypoints.deadline import Deadline
from vllm_omni.errors import DeadlineExceeded, InvalidRequest


def test_the_time_that_is_left_counts_from_the_arrival_and_is_never_zero() -> None:
    assert Deadline(None).left_s() is None
    left_s = Deadline(60, time.monotonic() - 20).left_s()
    assert left_s is not None and 39 < left_s <= 40
    late = Deadline(1, time.monotonic() - 20).left_s()
    assert late is not None and 0 < late < 1e-9


async def test_a_block_is_cancelled_at_the_deadline() -> None:
    was_cancelled = False
    with pytest.raises(DeadlineExceeded, match=r"deadline_s = 0\.01 has passed during the reading of an image"):
        async with Deadline(0.01).limit("the reading of an image"):
            try:
                await asyncio.Event().wait()
            finally:
                was_cancelled = True
    assert was_cancelled


@pytest.mark.parametrize("error", [TimeoutError("its own"), DeadlineExceeded("its own")], ids=repr)
async def test_another_timeout_inside_the_block_stays_itself(error: Exception) -> None:
    for deadline in (Deadline(60), Deadline(None)):
        with pytest.raises(type(error), match="its own"):
            async with deadline.limit("anything"):
                raise error


def test_what_is_no_time_is_rejected() -> None:
    values: list[Any] = [0, -1, float("nan"), "soon"]
    for value in values:
        with rejected(InvalidRequest, "deadline_s = .*: must be seconds, more than 0", value):
            Deadline(value)
