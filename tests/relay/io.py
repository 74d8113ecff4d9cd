"""What a test does between an event on the relay's I/O thread and what it expects of it."""

from vllm_omni.relay.io_thread import io_thread

DEADLINE_S = 20


def await_io_thread() -> None:
    """Wait until the thread has seen what happened to its connections so far."""

    async def nothing() -> None:
        pass

    for _ in range(3):  # what is done there may call for more
        io_thread().submit(nothing()).result(DEADLINE_S)
