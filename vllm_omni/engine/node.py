"""``StageNode``: a stage as a node of the graph."""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager, nullcontext
from itertools import zip_longest
from typing import TypeVar

from msgspec.structs import replace

from vllm_omni.config import StageConfig
from vllm_omni.engine.admission import AdmissionGate
from vllm_omni.engine.edge_spans import edge_spans
from vllm_omni.engine.streamed_reply import StreamedReplies, StreamedReply
from vllm_omni.errors import StageFailed, StageUnavailable
from vllm_omni.flow import Activation, Chunk, Emission, Yield
from vllm_omni.flow.run.frame import place_of
from vllm_omni.messages.outputs import OmniRequestOutput
from vllm_omni.messages.payload import decode, encode
from vllm_omni.messages.report import NodeReport, Reporter, ignore
from vllm_omni.messages.stage_output import StageOutput
from vllm_omni.model_executor.frames import Framing, Whole
from vllm_omni.model_executor.pipeline import RequestContext, Route, StageRequest, StageSpec
from vllm_omni.process.status import StageState, StageStatus

logger = logging.getLogger(__name__)

T = TypeVar("T")


def closed_at_end(items: AsyncIterator[T]) -> AbstractAsyncContextManager[AsyncIterator[T]]:
    """Close what a function of the pipeline has returned, so that its clean-up is part of the activation."""
    return aclosing(items) if isinstance(items, AsyncGenerator) else nullcontext(items)


class ServedNode(ABC):
    """A node of a served graph: a stage or a function."""

    name: str
    gate: AdmissionGate | None = None  # holds requests while the graph is paused

    @abstractmethod
    def forward(self, activation: Activation) -> AsyncGenerator[Yield, None]:
        """Run one activation, see ``flow.Node``."""

    @abstractmethod
    def current_status(self) -> StageStatus:
        """The status of the node as a whole."""

    def check_health(self) -> None:
        """Raises:
        StageUnavailable: it can serve no request: it is being restarted, or could not be.
        """
        status = self.current_status()
        if status.state is not StageState.RUNNING:
            raise StageUnavailable(self.name, f"{status.state}: {status.reason}")

    async def enter(self, context: RequestContext) -> None:
        """Wait while the graph is paused, unless the request was admitted before."""
        if self.gate is not None:
            await self.gate.enter(context.request_id)


class StageNode(ServedNode):
    """One engine, or a group of instances.

    The name is the stage's, or that of one instance: "thinker/PD0".
    """

    config: StageConfig
    spec: StageSpec
    whole_fields: Mapping[str, Collection[str]] = {}  # interface -> its outputs that are not streamed
    outer_readers: Mapping[tuple[str, str], Collection[str]] = {}  # see ``PayloadEdges``, as the next one
    entered: Collection[str] = ()
    streamed_replies: StreamedReplies | None = None  # of all stages of the server

    async def forward(self, activation: Activation) -> AsyncGenerator[Yield, None]:
        """Run one activation: each chunk of its input is a request, in order; outputs go to the fields that
        ``spec.route`` says, or to every wanted one.

        An input without a chunk (a branch that has nothing to say) yields nothing. Cancelling aborts the request.

        Raises:
            InvalidRequest: the engine rejected the request.
            StageFailed: the engine died, the model failed on this request, or the pipeline's own code failed.
            Exception: the input broke off with this error of an earlier stage.
        """
        await self.enter(activation.context)
        framings = self._framings(activation)
        try:
            async with aclosing(self._emissions(activation)) as emissions:
                async for one in emissions:
                    plain: list[Emission] = []
                    cut: list[tuple[str, list[StageOutput]]] = []
                    for each in [one] if isinstance(one, Emission) else one:
                        framing = framings.get(each.field)
                        if framing is None:
                            plain.append(each)
                        elif frames := list(framing.push(each.payload)):  # most pieces complete none
                            cut.append((each.field, frames))
                    if plain:
                        yield plain
                    for together in self._together(cut) if cut else ():
                        yield together
            for together in self._together([(field, framing.finish()) for field, framing in framings.items()]):
                yield together
        finally:
            spans, held_s = edge_spans(activation), activation.held_s()
            if spans or held_s:
                activation.report(NodeReport(self.name, spans=spans, held_s=held_s))

    def _together(self, cut: Sequence[tuple[str, Iterable[StageOutput]]]) -> Iterator[list[Emission]]:
        """Frames of what was yielded together: where fields are cut in the same way, one frame of each."""
        alike: dict[Callable[[], Framing] | None, list[tuple[str, Iterable[StageOutput]]]] = {}
        for field, frames in cut:
            alike.setdefault(self.spec.frames.get(field), []).append((field, frames))
        for some in alike.values():
            for row in zip_longest(*(frames for _, frames in some)):
                yield [Emission(field, one) for (field, _), one in zip(some, row, strict=True) if one is not None]

    def _framings(self, activation: Activation) -> dict[str, Framing]:
        """How the wanted fields are cut that an engine's outputs are not frames of."""
        whole = self.whole_fields.get(activation.interface, ())
        made = {field: Whole() for field in activation.wanted if field in whole}
        return made | {name: make() for name, make in self.spec.frames.items() if name in activation.wanted}

    async def _emissions(self, activation: Activation) -> AsyncGenerator[Yield, None]:
        """The engine's outputs in the fields that they belong to."""
        async with aclosing(self._outputs(activation)) as outputs:
            if (route := self.spec.route.get(activation.interface)) is not None:
                async with aclosing(self._routed(route, outputs, activation)) as routed:
                    async for emissions in routed:
                        yield emissions
                return
            async for output, is_last in outputs:
                yield [Emission(field, output, last=is_last) for field in activation.wanted]

    async def _routed(
        self, route: Route, outputs: AsyncIterator[tuple[StageOutput, bool]], activation: Activation
    ) -> AsyncGenerator[Yield, None]:
        errors: list[Exception] = []  # of the engine

        async def of_engine() -> AsyncGenerator[StageOutput, None]:
            try:
                async for output, _ in outputs:
                    yield output
            except Exception as exc:
                errors.append(exc)
                raise

        try:
            async with (
                aclosing(of_engine()) as engine_outputs,
                closed_at_end(route(engine_outputs, activation)) as routed,
            ):
                async for emissions in routed:
                    yield emissions
        except Exception as exc:
            if exc in errors:
                raise
            raise self._failed(activation, "its outputs could not be routed", exc) from exc

    async def _outputs(self, activation: Activation) -> AsyncGenerator[tuple[StageOutput, bool], None]:
        """The outputs of the activation's requests, and whether each is the last one."""
        context: RequestContext = activation.context
        place = place_of(activation.path)
        if len(self.whole_fields) > 1:  # several nodes of the call may have this stage
            place = f".{activation.interface}{place}"
        place += activation.call_id.partition(context.request_id)[2]  # within graph calls of the request
        duration_s = 0.0  # without the time spent waiting for the next chunk
        async with self._requests(activation) as requests:
            while (chunk := await self._next(requests, activation)) is not None:
                if chunk.payload is None:
                    continue
                started = time.monotonic()
                suffix = f"{place}-{chunk.seq}" if chunk.seq else place
                # Closing the generator waits for the engine's acknowledgement of an abort.
                async with aclosing(self._generated(chunk, activation, suffix)) as outputs:
                    async for output in outputs:
                        is_last = output.finished and chunk.last
                        if is_last:
                            activation.report(NodeReport(self.name, duration_s + time.monotonic() - started))
                        yield StageOutput.of(output), is_last
                if chunk.last:
                    return
                duration_s += time.monotonic() - started
        if duration_s:
            activation.report(NodeReport(self.name, duration_s))

    @asynccontextmanager
    async def _requests(self, activation: Activation) -> AsyncGenerator[AsyncIterator[Chunk], None]:
        """The chunks of the only field, which the graph closes, or those that ``spec.combine`` makes."""
        combine = self.spec.combine.get(activation.interface)
        if combine is None:
            (chunks,) = activation.inputs.values()
            yield chunks
            return
        try:
            made = combine(activation)
        except Exception as exc:
            raise self._failed(activation, "its request could not be made", exc) from exc
        async with closed_at_end(made) as chunks:
            yield chunks

    def _generated(self, chunk: Chunk, activation: Activation, suffix: str) -> AsyncGenerator[OmniRequestOutput, None]:
        request, wanted = self._check(chunk, activation), activation.wanted
        if (
            self.streamed_replies is not None
            and self.spec.publishing_fields & wanted
            and not self.spec.publishes_pictures
        ):
            reply = StreamedReply(self, request, activation.context, wanted, suffix)
            return reply.follow(self.streamed_replies, activation.report)
        return self.generate(request, activation.context, wanted, suffix, activation.report)

    def _check(self, chunk: Chunk, activation: Activation) -> StageRequest:
        """The request, with the references that are its own, and with the nodes that read what the stage publishes."""
        request = chunk.payload
        if not isinstance(request, StageRequest):
            kind = type(request).__name__
            raise StageFailed(self.name, f"its request is a {kind}: the pipeline must make a StageRequest of it")
        args, node = dict(request.args), activation.node
        if node in self.entered and "payloads" in args:  # they were encoded for several nodes
            args["payloads"] = [encode(decode(packed).of(node)) for packed in args["payloads"]]
        published = self.spec.publishing_fields & activation.wanted
        readers = {
            reader
            for field in published
            for reader in (*activation.readers.get(field, ()), *self.outer_readers.get((node, field), ()))
        }
        if readers:
            args["readers"] = sorted(readers)
        return replace(request, args=args, is_read_whole=self._is_read_whole(activation))

    def _is_read_whole(self, activation: Activation) -> bool:
        """Whether nothing reads a piece of a reply before its end; media are fetched, and rows read, as they come.

        A route of the pipeline's own reads pieces: it may end the reply early.
        """
        wanted, whole = activation.wanted, self.whole_fields.get(activation.interface, ())
        route = self.spec.route.get(activation.interface)
        if (route is not None and not getattr(route, "reads_whole", False)) or self.spec.output_type != "text":
            return False
        return wanted <= set(whole) and not wanted & (self.spec.publishing_fields | self.spec.frames.keys())

    async def _next(self, requests: AsyncIterator[Chunk], activation: Activation) -> Chunk | None:
        """The next request, as the pipeline's functions make it; None at the end.

        Raises:
            StageFailed: one of them raised, whatever it was: it is not the client's.
            Exception: the error of an earlier stage, which ended its stream.
        """
        try:
            return await anext(requests)
        except StopAsyncIteration:
            return None
        except Exception as exc:
            if activation.is_of_producer(exc):
                raise
            raise self._failed(activation, "its request could not be made", exc) from exc

    def _failed(self, activation: Activation, what: str, error: Exception) -> StageFailed:
        logger.exception("request %s: stage %s: %s", activation.context.request_id, self.name, what)
        return StageFailed(self.name, f"{what}: {error!r}")

    @abstractmethod
    def generate(
        self,
        request: StageRequest,
        context: RequestContext,
        wanted: frozenset[str],
        suffix: str = "",
        report: Reporter = ignore,
    ) -> AsyncGenerator[OmniRequestOutput, None]:
        """Stream one request, as deltas; if closed early, return once the engine has dropped it.

        Args:
            wanted: fields of the graph that the call needs from this stage.
            suffix: distinguishes the request from others of the call in the engine's request id.
            report: gets the times of its tasks, and what the engine has published, whose owner it then is.
        """
