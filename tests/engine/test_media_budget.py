"""Prompts hold a bounded number of bytes, in order, and never wait for each other in a circle."""

import asyncio

import pytest

from vllm_omni.engine.media_budget import HOLDING, Holding, MediaBudget
from vllm_omni.errors import InvalidRequest


class Prompt:
    """A prompt that reserves its items one after the other and then waits for its processing."""

    def __init__(self, budget: MediaBudget, *sizes: int) -> None:
        self.num_granted = 0
        self.processed = asyncio.Event()
        self.task = asyncio.ensure_future(self._read(budget, sizes))

    async def _read(self, budget: MediaBudget, sizes: tuple[int, ...]) -> None:
        with budget.hold() as holding:
            assert HOLDING.get() is holding
            for size in sizes:
                await budget.reserve(holding, size)
                self.num_granted += 1
            await self.processed.wait()


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def end(*prompts: Prompt) -> None:
    for prompt in prompts:
        prompt.processed.set()
    await asyncio.gather(*(prompt.task for prompt in prompts))


async def test_bytes_are_granted_in_order_of_arrival() -> None:
    budget = MediaBudget(100, 100)
    first, large, small = Prompt(budget, 60), Prompt(budget, 90), Prompt(budget, 10)
    await settle()
    assert (first.num_granted, large.num_granted, small.num_granted) == (1, 0, 0)  # the small one does not overtake
    await end(first)
    await settle()
    assert (large.num_granted, small.num_granted) == (1, 1)
    await end(large, small)
    assert budget.num_held_bytes == 0


async def test_prompts_with_several_items_do_not_wait_for_each_other() -> None:
    budget = MediaBudget(100, 100)
    with budget.hold() as second:
        with budget.hold() as first:
            await budget.reserve(first, 50)
            await budget.reserve(second, 50)
            waits = asyncio.ensure_future(budget.reserve(second, 50))
            await settle()
            assert not waits.done()
            await budget.reserve(first, 50)  # the oldest may exceed the budget
            assert budget.num_held_bytes == 150
        await waits
    assert budget.num_held_bytes == 0


async def test_a_prompt_that_exceeds_the_whole_budget_is_rejected() -> None:
    budget = MediaBudget(1000, 100)
    prompt = Prompt(budget, 600, 600)
    with pytest.raises(InvalidRequest, match="take 1,200 bytes to decode and process: at most 1,000 are possible"):
        await prompt.task
    assert budget.num_held_bytes == 0


async def test_a_prompt_that_is_aborted_while_it_waits_leaves_the_order() -> None:
    budget = MediaBudget(100, 100)
    first, waits, last = (Prompt(budget, 100) for _ in range(3))
    await settle()
    waits.task.cancel()
    await end(first)
    await settle()
    assert last.num_granted == 1
    await end(last)
    assert budget.num_held_bytes == 0


async def test_items_of_a_prompt_that_has_failed_get_nothing() -> None:
    budget = MediaBudget(100, 100)
    other = Prompt(budget, 100)
    await settle()

    async def read(failed: list[Holding]) -> asyncio.Future[None]:
        with budget.hold() as holding:
            failed.append(holding)
            waits = asyncio.ensure_future(budget.reserve(holding, 50))
            await settle()
            return waits

    failed: list[Holding] = []
    waits = await read(failed)
    with pytest.raises(asyncio.CancelledError):
        await waits
    with pytest.raises(asyncio.CancelledError):
        await budget.reserve(failed[0], 10)
    await end(other)
    assert budget.num_held_bytes == 0
