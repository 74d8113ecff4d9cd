"""``Results``: what outlives its request: results by URL (``GET /v1/files/...``), and videos made as jobs."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from http import HTTPStatus
from pathlib import Path
from typing import NamedTuple

from fastapi import Request
from fastapi.responses import FileResponse
from pydantic import BaseModel, ConfigDict, Field
from starlette.exceptions import HTTPException
from starlette.responses import MalformedRangeHeader, RangeNotSatisfiable

from vllm_omni import envs
from vllm_omni.entrypoints.openai.diffusion_protocol import read_query
from vllm_omni.entrypoints.openai.job_places import JobPlaces, TakePlace
from vllm_omni.errors import ConfigError, FileExpired, StorageFull, UnknownFile, WrongSignature
from vllm_omni.files.jobs import JobStore
from vllm_omni.files.results import Limits, ResultStore

logger = logging.getLogger(__name__)

FILE_ROUTE = "/v1/files/{file_id}"
FILE_NAME = "result_file"  # of the route
SWEEP_S = 60.0
CLOSE_TIMEOUT_S = 5.0  # for jobs that were aborted to note it


class FileQuery(BaseModel):
    """What the address of a file has behind its path."""

    model_config = ConfigDict(extra="forbid")

    expires: int = Field(ge=0, lt=2**53, description="When the address expires, seconds since 1970.")
    signature: str = Field(description="Made by the server, with the address.")


class StoredUrl(NamedTuple):
    """Where a result is, and until when."""

    url: str
    expires_at: int


class Results:
    """The directory of results and jobs, once a route needs it, and the jobs that run.

    Args:
        take_place: gives jobs their places; those of this process by default.

    Attributes:
        running: the tasks of jobs, by id.
    """

    def __init__(self, take_place: TakePlace | None = None) -> None:
        self.take_place = take_place or JobPlaces().take
        self.running: dict[str, asyncio.Task[None]] = {}
        self._jobs: JobStore | None = None
        self._missing = "the server has no directory for results"

    def open(self) -> None:
        """Open the directory. The server starts without it where nothing names one, and the default cannot be used.

        Raises:
            ConfigError: ``VLLM_OMNI_FILES_DIR`` cannot be used.
        """
        if self._jobs is not None:
            return
        try:
            limits = Limits(envs.VLLM_OMNI_MAX_FILE_BYTES, envs.VLLM_OMNI_FILE_TTL_S)
            self._jobs = JobStore(ResultStore(envs.VLLM_OMNI_FILES_DIR, limits))
        except ConfigError as exc:
            if "VLLM_OMNI_FILES_DIR" in os.environ:
                raise
            self._missing = str(exc)
            logger.warning("no videos as jobs, and no results by URL: %s", exc)

    @property
    def jobs(self) -> JobStore:
        """Raises ``StorageFull`` where there is no directory."""
        if self._jobs is None:
            raise StorageFull(self._missing)
        return self._jobs

    @property
    def store(self) -> ResultStore:
        return self.jobs.results

    async def check_room(self) -> None:
        """Raise ``StorageFull`` before work whose result could not be stored."""
        await asyncio.to_thread(self.store.check_room)

    async def keep(self, content: bytes, media_type: str, raw_request: Request) -> StoredUrl:
        """Store a result, and make its address, as the client sees this server.

        Raises:
            StorageFull: it cannot be stored.
        """
        file = await asyncio.to_thread(self.store.add, content, media_type)
        url = raw_request.url_for(FILE_NAME, file_id=file.id)
        signature = self.store.sign(file.id, file.expires_at)
        return StoredUrl(str(url.include_query_params(expires=file.expires_at, signature=signature)), file.expires_at)

    async def file(self, file_id: str, raw_request: Request) -> FileResponse:
        """Send a result whose address an answer has named, without an API key: the address is signed.

        Raises:
            WrongSignature, FileExpired, UnknownFile: see these.
        """
        query = read_query(FileQuery, raw_request)
        if not self.store.is_signed(file_id, query.expires, query.signature):
            raise WrongSignature("signature: it is not that of this address", param="signature")
        if query.expires <= self.store.clock():
            raise FileExpired("expires: the address has expired: ask for the result again", param="expires")
        file = await asyncio.to_thread(self.store.find, file_id)
        if file is None:
            raise UnknownFile(f"there is no file {file_id} any longer", param="file_id")
        return MediaFile(self.store.path(file_id), media_type=file.media_type)

    # -- upkeep -------------------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def kept(self) -> AsyncIterator[None]:
        """Remove what expires inside the block; at its end, wait until the jobs have noted theirs."""
        if self._jobs is None:
            yield
            return
        sweeping = asyncio.create_task(self._sweep(self._jobs), name="sweep-results")
        try:
            yield
        finally:
            sweeping.cancel()
            await asyncio.gather(sweeping, return_exceptions=True)
            await self.aclose()

    async def aclose(self) -> None:
        """End the jobs that still run, and close the directory; a second call does nothing."""
        if self.running:
            _, left = await asyncio.wait(self.running.values(), timeout=CLOSE_TIMEOUT_S)
            for task in left:
                task.cancel()
            await asyncio.gather(*left, return_exceptions=True)
        if self._jobs is not None:
            self._jobs.close()
            self._jobs = None

    @staticmethod
    async def _sweep(jobs: JobStore) -> None:
        while True:
            try:
                await asyncio.to_thread(jobs.sweep)
            except OSError as exc:  # the disk may be back later
                logger.warning("results that have expired cannot be removed: %s", exc)
            await asyncio.sleep(SWEEP_S)


class MediaFile(FileResponse):
    """A file, whole or in ranges; a range that it does not have is an error of the usual shape."""

    def __init__(self, path: Path, *, media_type: str, filename: str | None = None) -> None:
        """Raises ``UnknownFile`` where it has been removed meanwhile."""
        headers = {"Cache-Control": "private", "X-Content-Type-Options": "nosniff"}
        try:
            about = path.stat()
        except FileNotFoundError as exc:
            raise UnknownFile("the file has been removed") from exc
        super().__init__(path, headers=headers, media_type=media_type, filename=filename, stat_result=about)

    @classmethod
    def _parse_range_header(cls, http_range: str, file_size: int) -> list[tuple[int, int]]:
        try:
            return super()._parse_range_header(http_range, file_size)
        except RangeNotSatisfiable as exc:
            said = f"Range: {http_range[:80]!r}: the file has {file_size} bytes"
            headers = {"Content-Range": f"bytes */{exc.max_size}"}
            raise HTTPException(HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE, said, headers) from exc
        except MalformedRangeHeader as exc:
            said = f"Range: {http_range[:80]!r}: must be bytes=FIRST-LAST"
            raise HTTPException(HTTPStatus.BAD_REQUEST, said) from exc
