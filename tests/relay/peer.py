"""A process with one relay, driven by commands over a pipe, for tests with several processes."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import multiprocessing
import os
import signal
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any

import torch

from tests.contract.relays import BACKENDS, NUM_BYTES
from tests.processes import pause, resume
from vllm_omni.errors import PoolExhausted, RelayBroken
from vllm_omni.messages.payload import Payload, TensorRef, decode, encode

DEADLINE_S = 20.0  # of whatever a test waits for
LEASE_S = 60.0
POLL_S = 0.005


PERIOD = 251  # of the pattern; a prime, so that it fits into no page
_bytes = (torch.arange(NUM_BYTES + PERIOD) % PERIOD).to(torch.uint8)


def pattern(num_bytes: int, seed: int) -> torch.Tensor:
    """Return bytes that identify their tensor, uint8 [num_bytes]; read-only."""
    return _bytes[seed * 97 % PERIOD :][:num_bytes]


class Peer:
    """The test's side of such a process."""

    def __init__(self, backend: str):
        # Forked from a server that has imported this module and runs no thread: as clean as a spawned process, and
        # started at once.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["__main__", "tests.relay.peer"])
        self._pipe, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, backend), daemon=True)
        self.process.start()
        theirs.close()

    def start(self, command: str, *args: Any) -> None:
        """Send a command; ``answer`` waits for its result."""
        self._pipe.send((command, args))

    def answer(self) -> Any:
        """Return the result of the oldest command without one; raises what the command raised."""
        if not self._pipe.poll(DEADLINE_S):
            raise TimeoutError(f"process {self.process.pid} did not answer within {DEADLINE_S} s")
        result, error = self._pipe.recv()
        if error is not None:
            raise error
        return result

    def do(self, command: str, *args: Any) -> Any:
        self.start(command, *args)
        return self.answer()

    def kill(self) -> None:
        self.process.kill()
        self.process.join(DEADLINE_S)
        assert self.process.exitcode == -signal.SIGKILL

    def pause(self) -> None:
        assert self.process.pid is not None
        pause(self.process.pid)

    def resume(self) -> None:
        assert self.process.pid is not None
        resume(self.process.pid)

    def close(self) -> None:
        """Kill the process, whatever it does."""
        self._pipe.close()
        if self.process.is_alive():
            self.process.kill()
        self.process.join(DEADLINE_S)
        self.process.close()


@contextlib.contextmanager
def peers(*backends: str) -> Iterator[list[Peer]]:
    """Run a process for each backend; all have ended at exit."""
    with contextlib.ExitStack() as stack:
        made = []
        for backend in backends:
            made.append(Peer(backend))
            stack.callback(made[-1].close)
        yield made


# -- in the process ---------------------------------------------------------------------------------------------------


def _serve(pipe: Connection, backend: str) -> None:
    torch.set_num_threads(1)
    asyncio.run(_answer_all(pipe, Commands(backend)))


async def _answer_all(pipe: Connection, commands: Commands) -> None:
    with contextlib.suppress(EOFError):
        while True:
            name, args = pipe.recv()
            try:
                result = getattr(commands, name)(*args)
                if asyncio.iscoroutine(result):
                    result = await result
                pipe.send((result, None))
            except Exception as exc:
                pipe.send((None, exc))


class Commands:
    """The commands."""

    def __init__(self, backend: str):
        self.relay: Any = BACKENDS[backend].make()
        self.relay.lease_s = LEASE_S
        self.held: dict[int, tuple[torch.Tensor, int]] = {}  # lease -> view, seed of its pattern
        self.writer: Any = None
        self.reader: Any = None

    # producer

    async def put(
        self, request_id: str, num_bytes: int, seed: int, num_readers: int = 1, timeout_s: float = DEADLINE_S
    ) -> TensorRef:
        tensor = pattern(num_bytes, seed)
        return await self.relay.put(request_id, tensor, num_readers=num_readers, timeout_s=timeout_s)

    def fill(self, request_id: str, num_bytes: int) -> list[TensorRef]:
        """Put as many tensors as there is room for."""
        refs = []
        with contextlib.suppress(PoolExhausted):
            while True:
                refs.append(self.relay.put_nowait(request_id, pattern(num_bytes, len(refs))))
        return refs

    def abort(self, request_id: str) -> None:
        self.relay.abort(request_id)

    def produce(self, pipe: Connection, num_bytes: int) -> None:
        """Put and announce until the process is killed."""
        seed = 0
        while True:
            pipe.send((self.relay.put_nowait("request", pattern(num_bytes, seed)), seed))
            seed += 1
            while self.relay.statistics().num_leases > 8:
                pass

    async def await_leases(self, expected: int) -> int:
        """Wait for a number of leases; returns the number. Readers' messages may be in flight."""
        return await self._await(lambda: self.relay.statistics().num_leases, expected)

    def num_expired(self) -> int:
        return self.relay.statistics().num_expired

    def check_integrity(self) -> None:
        self.relay.check_integrity()

    # consumer

    def forward(self, ref: TensorRef) -> TensorRef:
        """Forward a reference as the front end does."""
        return decode(encode(Payload({"tensor": ref}))).tensors["tensor"]

    async def get(self, ref: TensorRef, seed: int, timeout_s: float = DEADLINE_S) -> bool:
        """Pull a tensor and hold it; returns whether it is the one that was put."""
        self.held[ref.lease] = await self.relay.get(ref, timeout_s=timeout_s), seed
        return self.check(ref)

    def get_blocking(self, ref: TensorRef, seed: int, timeout_s: float = DEADLINE_S) -> bool:
        self.held[ref.lease] = self.relay.get_blocking(ref, timeout_s), seed
        return self.check(ref)

    def check(self, ref: TensorRef) -> bool:
        tensor, seed = self.held[ref.lease]
        return torch.equal(tensor.flatten(), pattern(tensor.numel(), seed))

    def check_all(self) -> bool:
        """Whether all held tensors are unchanged."""
        return all(torch.equal(tensor.flatten(), pattern(tensor.numel(), seed)) for tensor, seed in self.held.values())

    def release(self, ref: TensorRef) -> None:
        self.held.pop(ref.lease, None)
        self.relay.release(ref)

    async def await_broken(self, ref: TensorRef) -> bool:
        """Wait until a reference of a dead producer raises ``RelayBroken``; returns whether it did."""

        def is_broken() -> bool:
            try:
                self.relay.get_blocking(ref, DEADLINE_S)
            except RelayBroken:
                return True
            return False

        return await self._await(is_broken, True)

    def consume(self, pipe: Connection) -> None:
        """Pull, compare and release until the process is killed."""
        while True:
            ref, seed = pipe.recv()
            tensor = self.relay.get_blocking(ref)
            assert torch.equal(tensor, pattern(tensor.numel(), seed))
            self.relay.release(ref)

    # streams

    def open_stream(self, request_id: str, credits: int) -> TensorRef:
        self.writer = self.relay.open_stream(request_id, (2,), torch.int64, credits=credits)
        return self.writer.ref

    async def write(self, values: list[int], timeout_s: float = DEADLINE_S) -> None:
        await self.writer.write(_rows(values), timeout_s=timeout_s)

    def write_nowait(self, values: list[int]) -> None:
        self.writer.write_nowait(_rows(values))

    async def await_credits(self, expected: int) -> int:
        return await self._await(lambda: self.writer.num_credits, expected)

    def end(self, error: str = "") -> None:
        self.writer.end(error)

    async def read_stream(self, ref: TensorRef) -> None:
        self.reader = await self.relay.read_stream(ref, timeout_s=DEADLINE_S)

    async def await_end(self) -> bool:
        return await self._await(lambda: self.reader.has_ended, True)

    async def await_unread(self, expected: int) -> int:
        return await self._await(lambda: self.reader.num_unread, expected)

    async def read(self, timeout_s: float = DEADLINE_S) -> list[int]:
        return (await self.reader.read(timeout_s=timeout_s))[:, 0].tolist()

    def close_reader(self) -> None:
        self.reader.close()
        self.reader = None

    # both

    def num_fds(self) -> int:
        gc.collect()
        return len(os.listdir("/proc/self/fd"))

    async def await_num_fds(self, expected: int) -> int:
        """Wait for a number of open descriptors; returns the number."""
        return await self._await(self.num_fds, expected)

    async def await_fewer_fds(self, limit: int) -> int:
        await self._await(lambda: self.num_fds() < limit, True)
        return self.num_fds()

    def close(self) -> None:
        self.relay.close()

    @staticmethod
    async def _await(look: Any, expected: Any) -> Any:
        found = look()
        deadline = time.monotonic() + DEADLINE_S / 2
        while found != expected and time.monotonic() < deadline:
            await asyncio.sleep(POLL_S)
            found = look()
        return found


def _rows(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64).reshape(-1, 1).repeat(1, 2)
