"""``JobStore``: videos that are made as jobs, which outlive the server that makes them.

A job is a folder of the ``ResultStore``: its state in ``about.json``, which each change replaces, and once it is
complete the files of the video. Every server that shares the directory reads all jobs; the one that runs a job, its
owner, alone changes its state. An owner holds a lock on a file of its own, which ends with its process however that
ends: the job of an owner without the lock has failed.
"""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import time
from collections.abc import Mapping
from contextlib import suppress
from itertools import islice
from typing import Any, Literal

import msgspec
from msgspec import structs

from vllm_omni.errors import JobGone, StorageFull
from vllm_omni.files.private import UNFINISHED, is_full
from vllm_omni.files.results import ABOUT, ResultStore

JOB_ID = re.compile(r"video_[0-9a-f]{32}")
OWNER = ".owner-"
ABANDONED = "the server that ran it has ended before it was complete: create it again"

Status = Literal["queued", "in_progress", "completed", "failed"]


class JobError(msgspec.Struct, frozen=True):
    """Why a job failed, in the terms of an HTTP answer."""

    code: str
    message: str
    type: str | None = None
    param: str | None = None


class VideoJob(msgspec.Struct, frozen=True, kw_only=True):
    """The state of a job."""

    id: str
    owner: str
    model: str
    prompt: str
    size: str
    seconds: float | None  # None: not known before it is complete
    created_at: int  # seconds since 1970
    status: Status = "queued"
    progress: int = 0  # percent
    completed_at: int | None = None
    expires_at: int | None = None  # it and its files are removed then; None while it is not complete
    error: JobError | None = None
    media_type: str | None = None  # of the video

    @property
    def has_ended(self) -> bool:
        return self.status in ("completed", "failed")


class JobStore:
    """Creates, changes, lists and removes jobs. Its methods block: they belong in a thread.

    Args:
        results: where they are kept; their quota and expiry hold.
    """

    def __init__(self, results: ResultStore) -> None:
        self.results = results
        self._directory = results.directory
        self.owner = f"{OWNER}{secrets.token_hex(8)}"
        self._running: set[str] = set()  # jobs that this server runs
        # Locked before it has its name, so that no other server takes it for one that is left.
        made = self._directory.path / f"{UNFINISHED}{self.owner}"
        with self._directory.locked():
            self._lock = os.open(made, os.O_RDWR | os.O_CREAT, 0o600)
            fcntl.flock(self._lock, fcntl.LOCK_EX)
            made.rename(self._directory.path / self.owner)

    def close(self) -> None:
        """Stop being an owner: what it has not completed has failed."""
        (self._directory.path / self.owner).unlink(missing_ok=True)
        os.close(self._lock)

    # -- changes by the owner -----------------------------------------------------------------------------------------

    def create(self, *, model: str, prompt: str, size: str, seconds: float | None) -> VideoJob:
        """Make a job of this server.

        Raises:
            StorageFull: the quota is used up, or the disk is full.
        """
        # Ids sort by age, so that a page of a list can be found without reading all jobs.
        job_id = f"video_{time.time_ns() // 1000:016x}{secrets.token_hex(8)}"
        now = int(self.results.clock())
        job = VideoJob(
            id=job_id, owner=self.owner, model=model, prompt=prompt, size=size, seconds=seconds, created_at=now
        )
        data = msgspec.json.encode(job)
        self._running.add(job_id)
        try:
            with self.results.changing(len(data)):
                self._directory.create(job_id, {ABOUT: data})
        except BaseException:
            self._running.discard(job_id)
            raise
        return job

    def advance(self, job: VideoJob, progress: int) -> VideoJob:
        """Note that a job runs, and how far it is.

        Raises:
            JobGone: it has been deleted.
            StorageFull: the disk is full.
        """
        job = structs.replace(job, status="in_progress", progress=progress)
        self._put(job, is_durable=False)
        return job

    def complete(self, job: VideoJob, files: Mapping[str, bytes], **changes: Any) -> VideoJob:
        """Store the files of a job, and that it is complete.

        Args:
            changes: to its fields.

        Raises:
            JobGone: it has been deleted.
            StorageFull: the quota is used up, or the disk is full.
        """
        job = structs.replace(job, status="completed", progress=100, **self._end(), **changes)
        with self.results.changing(sum(map(len, files.values()))):
            for name, data in files.items():
                self._put_file(job, name, data)
            self._put(job)
        self._running.discard(job.id)
        return job

    def fail(self, job: VideoJob, error: JobError) -> VideoJob:
        """Note why a job has failed; one that has been deleted, or is complete, stays so."""
        with suppress(OSError, msgspec.MsgspecError):
            stored = self._read(job.id)
            if stored.has_ended:
                self._running.discard(job.id)
                return stored
        job = structs.replace(job, status="failed", error=error, **self._end())
        self._drop_files(job)
        try:
            with suppress(JobGone, StorageFull):  # the latter: it is no longer running, and so has failed
                self._put(job)
        finally:
            self._running.discard(job.id)
        return job

    def _drop_files(self, job: VideoJob) -> None:
        """Remove what was stored of a video that is not complete."""
        for path in self.results.path(job.id).parent.glob("*"):
            if path.name != ABOUT:
                path.unlink(missing_ok=True)

    def _end(self) -> dict[str, int]:
        return {"completed_at": int(self.results.clock()), "expires_at": self.results.expiry()}

    def _put(self, job: VideoJob, *, is_durable: bool = True) -> None:
        self._put_file(job, ABOUT, msgspec.json.encode(job), is_durable=is_durable)

    def _put_file(self, job: VideoJob, name: str, data: bytes, *, is_durable: bool = True) -> None:
        try:
            self._directory.put(job.id, name, data, is_durable=is_durable)
        except FileNotFoundError as exc:
            self._running.discard(job.id)
            raise JobGone(f"the video {job.id} has been deleted") from exc
        except OSError as exc:
            if is_full(exc):
                raise StorageFull(f"the disk of {self._directory.path} is full") from exc
            raise

    # -- by any server ------------------------------------------------------------------------------------------------

    def find(self, job_id: str) -> VideoJob | None:
        """The job of an id, if there is one that has not expired; any text may be asked for."""
        if not JOB_ID.fullmatch(job_id):
            return None
        try:
            job = self._read(job_id)
        except (OSError, msgspec.MsgspecError):
            return None
        if not job.has_ended and not self._is_run(job):
            # If it has ended since it was read, it stays so: its owner writes that before it releases its lock.
            job = self.fail(job, JobError("service_unavailable", ABANDONED, "ServiceUnavailableError"))
        if job.expires_at is not None and job.expires_at <= self.results.clock():
            return None
        return job

    def page(self, limit: int, after: str | None = None, *, is_ascending: bool = False) -> tuple[list[VideoJob], bool]:
        """Jobs by age, and whether there are more.

        Args:
            after: the last job of the page before.
        """
        names = sorted(filter(JOB_ID.fullmatch, self._directory.names()), reverse=not is_ascending)
        if after is not None:
            names = [name for name in names if (name > after if is_ascending else name < after)]
        jobs = list(islice(filter(None, map(self.find, names)), limit + 1))
        return jobs[:limit], len(jobs) > limit

    def delete(self, job_id: str) -> bool:
        """Remove a job and its files, whatever its state; returns whether there was one.

        Its owner notices when it next changes it.
        """
        if self.find(job_id) is None:
            return False
        with self._directory.locked():
            return self._directory.remove(job_id)

    def sweep(self) -> None:
        """Fail the jobs whose owners have ended, and remove what has expired."""
        for name in filter(JOB_ID.fullmatch, self._directory.names()):
            self.find(name)
        for owner in self._directory.path.glob(f"{OWNER}*"):
            if owner.name != self.owner and not self._is_alive(owner.name):
                owner.unlink(missing_ok=True)
        self.results.remove_expired()

    def _read(self, job_id: str) -> VideoJob:
        return msgspec.json.decode(self._directory.read(job_id, ABOUT), type=VideoJob)

    def _is_run(self, job: VideoJob) -> bool:
        return job.id in self._running if job.owner == self.owner else self._is_alive(job.owner)

    def _is_alive(self, owner: str) -> bool:
        try:
            with (self._directory.path / owner).open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except FileNotFoundError:
            return False
        except BlockingIOError:
            return True
        return False
