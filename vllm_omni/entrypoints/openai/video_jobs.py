"""``/v1/videos``: videos made as jobs, which a client creates, asks about, fetches and deletes.

The state of a job and its files are in the directory of ``Results``. A job runs in the server that created it, as a
task: the engine queues and batches its request as any other. Every server that shares the directory answers for it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

from fastapi import Request, Response
from starlette.datastructures import UploadFile

from vllm_omni.engine.running import STOPPING, RunningRequests
from vllm_omni.entrypoints.openai.bodies import body_held
from vllm_omni.entrypoints.openai.diffusion import Values, read_upload
from vllm_omni.entrypoints.openai.diffusion_protocol import read_query
from vllm_omni.entrypoints.openai.errors import body_of, end_of_stream
from vllm_omni.entrypoints.openai.results import MediaFile, Results
from vllm_omni.entrypoints.openai.video_protocol import (
    Video,
    VideoContentQuery,
    VideoDeleted,
    VideoJobRequest,
    VideoList,
    VideoListQuery,
)
from vllm_omni.entrypoints.openai.videos import MadeVideo, VideoMaker, VideoOrder
from vllm_omni.errors import InvalidRequest, JobGone, NotReady, ShuttingDown, UnknownFile
from vllm_omni.files.jobs import JobError, VideoJob
from vllm_omni.media.stills import encode_spritesheet, encode_thumbnail
from vllm_omni.messages.outputs import OmniRequestOutput

logger = logging.getLogger(__name__)

# How long the answer to a new job waits until the engine has started or rejected it; then it is queued. What only the
# pipeline can check is thus an error of the request itself, unless the engine is busy.
ADMISSION_S = 1.0
ABORT_TIMEOUT_S = 15.0  # an abort has deadlines of its own, stage by stage
MEDIA_TYPES = {"thumbnail": "image/webp", "spritesheet": "image/jpeg"}


@dataclass
class _Run:
    """A job that runs here.

    Attributes:
        job: as it was stored last.
        is_settled: it has started, or ended.
        is_answered: its request has been: from then on, an error is the job's.
        rejection: its error, before.
    """

    job: VideoJob
    is_settled: asyncio.Event = field(default_factory=asyncio.Event)
    is_answered: bool = False
    rejection: Exception | None = None


class OmniServingVideos:
    """Answers the routes of videos as jobs.

    Args:
        requests: of the server, which a job is one of until it has ended.
    """

    def __init__(self, maker: VideoMaker, results: Results, requests: RunningRequests) -> None:
        self._maker = maker
        self._results = results
        self._requests = requests

    # -- routes -------------------------------------------------------------------------------------------------------

    async def create(self, values: Values, raw_request: Request) -> Response:
        """Start to make a video from a text and, where the pipeline accepts one, an image.

        Raises:
            InvalidRequest: names the field; whatever the engine rejects at once is a fault of the request, too.
            Overloaded: so many are not complete.
            StorageFull: the video could not be stored.
        """
        order = self._maker.read(values, VideoJobRequest)
        order.images.given = [(name, await _read(one, name)) for name, one in order.images.given]
        async with AsyncExitStack() as place:
            await place.enter_async_context(self._results.take_place())
            run = _Run(await self._store(order))
            # A request of its own, without the body that this one has read.
            work = self._run(run, order, Request(raw_request.scope), place.pop_all())
        job_id = run.job.id
        task = self._results.running[job_id] = asyncio.create_task(work, name=job_id)
        task.add_done_callback(lambda _: self._results.running.pop(job_id))
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(ADMISSION_S):
                    await run.is_settled.wait()
        except asyncio.CancelledError:  # the client has left before it knew the job's id
            await self._remove(job_id)
            raise
        if run.rejection is not None:
            await self._remove(job_id)
            raise run.rejection
        run.is_answered = True
        return _answer(Video.of(run.job))

    async def list(self, raw_request: Request) -> Response:
        """List videos by age, page by page."""
        query = read_query(VideoListQuery, raw_request)
        page = self._results.jobs.page
        jobs, has_more = await asyncio.to_thread(page, query.limit, query.after, is_ascending=query.order == "asc")
        ends = (jobs[0].id, jobs[-1].id) if jobs else (None, None)
        data = [Video.of(job) for job in jobs]
        return _answer(VideoList(data=data, first_id=ends[0], last_id=ends[1], has_more=has_more))

    async def retrieve(self, video_id: str) -> Response:
        """The state of a video."""
        return _answer(Video.of(await self._find(video_id)))

    async def content(self, video_id: str, raw_request: Request) -> Response:
        """Send the file of a complete video, or small pictures of it; also in ranges.

        Raises:
            UnknownFile: there is no such video, or it has failed.
            NotReady: it is not complete.
        """
        variant = read_query(VideoContentQuery, raw_request).variant
        job = await self._find(video_id)
        if job.error is not None:
            raise UnknownFile(f"{video_id} has failed, and has no content: {job.error.message}", param="video_id")
        if job.media_type is None:
            raise NotReady(f"{video_id} is {job.status}, at {job.progress} %: it has no content yet", param="video_id")
        media_type = MEDIA_TYPES.get(variant, job.media_type)
        name = f"{video_id}.{media_type.partition('/')[2]}"
        return MediaFile(self._results.store.path(video_id, variant), media_type=media_type, filename=name)

    async def delete(self, video_id: str) -> Response:
        """Delete a video. One that is not complete is aborted, at once if this server makes it.

        Raises:
            UnknownFile: there is no such video.
        """
        if not await self._remove(video_id):
            raise _unknown(video_id)
        return _answer(VideoDeleted(id=video_id))

    async def _find(self, video_id: str) -> VideoJob:
        job = await asyncio.to_thread(self._results.jobs.find, video_id)
        if job is None:
            raise _unknown(video_id)
        return job

    async def _remove(self, video_id: str) -> bool:
        was_there = await asyncio.to_thread(self._results.jobs.delete, video_id)
        task = self._results.running.get(video_id)
        if task is not None:
            task.cancel()
            await asyncio.wait([task], timeout=ABORT_TIMEOUT_S)
        return was_there

    async def _store(self, order: VideoOrder) -> VideoJob:
        jobs, fields = self._results.jobs, order.fields
        model = self._maker.serving.model_name(fields)
        return await asyncio.to_thread(
            lambda: jobs.create(model=model, prompt=fields.prompt, size=fields.size, seconds=order.seconds)
        )

    # -- a job --------------------------------------------------------------------------------------------------------

    async def _run(self, run: _Run, order: VideoOrder, raw_request: Request, place: AsyncExitStack) -> None:
        """Make the video of a job in its place; never raises, but for a cancellation."""
        async with place:
            await self._run_in_place(run, order, raw_request)

    async def _run_in_place(self, run: _Run, order: VideoOrder, raw_request: Request) -> None:
        try:
            with body_held(raw_request), self._requests.arrive():
                await self._make(run, order, raw_request)
        except JobGone as exc:
            logger.info("%s: it is aborted", exc)
        except asyncio.CancelledError:  # it has been deleted, or the server ends
            await self._fail(run, body_of(ShuttingDown(STOPPING)))
            raise
        except Exception as exc:
            if run.is_answered:
                await self._fail(run, end_of_stream(exc, run.job.id))
            else:
                run.rejection = exc
        finally:
            run.is_settled.set()

    async def _make(self, run: _Run, order: VideoOrder, raw_request: Request) -> None:
        jobs = self._results.jobs

        async def notify(output: OmniRequestOutput) -> None:
            progress = _percent(output)
            if run.job.status == "queued" or progress > run.job.progress:
                run.job = await asyncio.to_thread(jobs.advance, run.job, progress)
            run.is_settled.set()

        made = await self._maker.make(order, raw_request, notify)
        files = await asyncio.to_thread(_files_of, made)
        about = {"size": made.size, "seconds": made.seconds, "media_type": made.media_type}
        storing = asyncio.create_task(asyncio.to_thread(jobs.complete, run.job, files, **about))
        try:
            run.job = await asyncio.shield(storing)
        except asyncio.CancelledError:
            await asyncio.wait([storing])  # its thread continues: it must not complete what has failed meanwhile
            raise

    async def _fail(self, run: _Run, body: Mapping[str, Any]) -> None:
        error = body["error"]
        code = HTTPStatus(error["code"]).name.lower()
        described = JobError(code, error["message"], error["type"], error["param"])
        run.job = await asyncio.to_thread(self._results.jobs.fail, run.job, described)


def _percent(output: OmniRequestOutput) -> int:
    """How much of a video is made; the rest, up to 100, is its encoding."""
    if output.progress is None or not output.progress.num_steps:
        return 0
    return min(100 * output.progress.step // output.progress.num_steps, 99)


def _files_of(made: MadeVideo) -> dict[str, bytes]:
    return {
        "video": made.file,
        "thumbnail": encode_thumbnail(made.frames),
        "spritesheet": encode_spritesheet(made.frames),
    }


async def _read(given: object, field: str) -> object:
    """An uploaded file is closed once its request has been answered."""
    if not isinstance(given, UploadFile):
        return given
    try:
        return await read_upload(given)
    except InvalidRequest as exc:
        raise InvalidRequest(f"{field}: {exc}", param=field) from exc


def _answer(body: Video | VideoList | VideoDeleted) -> Response:
    return Response(body.model_dump_json(), media_type="application/json")


def _unknown(video_id: str) -> UnknownFile:
    return UnknownFile(f"there is no video {video_id[:80]!r}: it has been deleted, or has expired", param="video_id")
