"""``StreamedReply``: a reply whose rows another stage reads while they are made; they can be computed again."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import TYPE_CHECKING

from msgspec.structs import replace
from vllm.sampling_params import SamplingParams

from vllm_omni.errors import StageFailed
from vllm_omni.messages.outputs import OmniRequestOutput
from vllm_omni.messages.payload import Payload, TensorRef
from vllm_omni.messages.report import NodeReport, Reporter
from vllm_omni.model_executor.frame_publisher import FRAME
from vllm_omni.model_executor.pipeline import RequestContext, StageRequest

if TYPE_CHECKING:
    from vllm_omni.engine.node import StageNode


class StreamedReply:
    """The tokens of a reply, from which its stage makes the rows again when the engine that read them has died.

    A ring keeps no row that was read, and keeping all of them would cost memory for each request. Their tokens are
    here anyway, and one prefill behind the prompt gives the same rows.

    Args:
        node: the stage, whichever of its engines computes.
        suffix: as in ``StageNode.generate``.
    """

    def __init__(
        self, node: StageNode, request: StageRequest, context: RequestContext, wanted: frozenset[str], suffix: str
    ) -> None:
        self._node = node
        self._request = request
        self._context = context
        self._wanted = wanted
        self._suffix = suffix
        self._token_ids: list[int] = []
        self._frames: list[Payload] = []  # of a talker: the front end has them all
        self._readers: dict[TensorRef, str] = {}  # stream -> the node of the graph that reads it
        self._has_ended = asyncio.Event()
        self._failure: Exception | None = StageFailed(node.config.name, "its reply was left before its end")
        self._num_repeats = 0

    async def follow(self, replies: StreamedReplies, report: Reporter) -> AsyncGenerator[OmniRequestOutput, None]:
        """Stream the reply (``StageNode.generate``), which ``replies`` knows by its stream from the first row on."""
        outputs = self._node.generate(self._request, self._context, self._wanted, self._suffix, report)
        try:
            async with aclosing(outputs):
                async for output in outputs:
                    for payload in output.payloads:
                        for node, stream in payload.streams.items():
                            self._readers[stream] = node
                            replies.add(self._context.request_id, stream, self)
                        if isinstance(payload.values, dict) and FRAME in payload.values:
                            self._frames.append(replace(payload, streams={}))
                    for completion in output.outputs:
                        self._token_ids += completion.token_ids
                    yield output
            self._failure = None
        except Exception as exc:
            self._failure = exc
            raise
        finally:
            self._has_ended.set()

    async def compute_rows_again(self, stream: TensorRef, report: Reporter) -> list[Payload]:
        """Publish the rows of prompt and reply once more, all in one piece, after the reply has ended. Frames are
        not computed again: they came with the tokens.

        Args:
            stream: one of the reply, for whose reader alone they are.
            report: gets what is published.

        Raises:
            StageFailed: the stage failed, on the reply or now.
        """
        await self._has_ended.wait()
        if self._failure is not None:
            raise self._failure
        if self._frames:
            return self._frames
        self._num_repeats += 1
        name = self._node.config.name
        only_rows = SamplingParams(temperature=0.0, max_tokens=1, detokenize=False)
        # The last token was never processed, so it has no row; the one that is sampled now takes its place.
        reader = self._readers[stream]
        args = {**self._request.args, "readers": [reader]}
        request = replace(self._request, args=args, given=tuple(self._token_ids[:-1]))
        context = replace(self._context, params={**self._context.params, name: only_rows})
        suffix = f"{self._suffix}-r{self._num_repeats}"

        def report_published(news: NodeReport) -> None:  # without times: the user has seen no token of these
            if news.published:
                report(NodeReport(news.node, published=news.published))

        payloads: list[Payload] = []
        outputs = self._node.generate(request, context, self._wanted, suffix, report_published)
        async with aclosing(outputs):
            async for output in outputs:
                payloads += [payload.of(reader) for payload in output.payloads]
        return payloads


class StreamedReplies:
    """The streamed replies of the requests that run, by the stream of their rows."""

    def __init__(self) -> None:
        self._by_stream: dict[TensorRef, StreamedReply] = {}
        self._streams: dict[str, list[TensorRef]] = {}  # by request

    def __len__(self) -> int:
        return len(self._by_stream)

    def add(self, request_id: str, stream: TensorRef, reply: StreamedReply) -> None:
        self._by_stream[stream] = reply
        self._streams.setdefault(request_id, []).append(stream)

    def find(self, stream: TensorRef) -> StreamedReply | None:
        """The reply whose rows a stream has; None if it is of no request that runs."""
        return self._by_stream.get(stream)

    def forget(self, request_id: str) -> None:
        """The request has ended."""
        for stream in self._streams.pop(request_id, ()):
            self._by_stream.pop(stream, None)
