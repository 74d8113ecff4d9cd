"""Read the inputs of an activation: through transfer functions, several edges of a field one after the other."""

from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import AsyncExitStack, aclosing

from vllm_omni.flow.graph.transfer import CallInfo, Chunk
from vllm_omni.flow.run.bucket import Slot


async def chain(slots: Sequence[AsyncIterator[Chunk]], limit: int | None) -> AsyncGenerator[Chunk, None]:
    """Concatenate the edges of one field, up to ``limit`` chunks."""
    seq = 0
    for chunks in slots:
        if seq == limit:
            return
        async for chunk in chunks:
            yield Chunk(chunk.payload, seq, chunk.last or seq + 1 == limit)
            seq += 1
            if seq == limit:
                return


async def transfer(slot: Slot, info: CallInfo) -> AsyncGenerator[Chunk, None]:
    """Run an edge's transfer function lazily, in the consumer's task; number its chunks and name it in its errors."""
    edge = slot.edge
    assert edge.transfer is not None
    try:
        async with AsyncExitStack() as cleanup:
            converted = edge.transfer(slot.stream, info)
            if isinstance(converted, AsyncGenerator):
                await cleanup.enter_async_context(aclosing(converted))
            seq = 0
            async for chunk in converted:
                if chunk.last:
                    # Before the chunk is processed: the edge's remaining frames must not wait for that.
                    await cleanup.aclose()
                    slot.abandon()
                yield chunk if chunk.seq == seq else Chunk(chunk.payload, seq, chunk.last)
                if chunk.last:
                    return
                seq += 1
    except Exception as exc:
        exc.add_note(f"in transfer function {getattr(edge.transfer, '__qualname__', edge.transfer)!r} on edge {edge}")
        raise
