"""Jobs survive the server that runs them, and say so when it has ended."""

import multiprocessing
import os
import signal
from pathlib import Path

import pytest

from tests.files.test_results import Clock, make_store
from vllm_omni.errors import JobGone, StorageFull
from vllm_omni.files.jobs import OWNER, JobError, JobStore, VideoJob

FILES = {"video": b"frames", "thumbnail": b"a frame"}


@pytest.fixture
def clock() -> Clock:
    return Clock()


def make_jobs(tmp_path: Path, clock: Clock, max_bytes: int = 10_000) -> JobStore:
    return JobStore(make_store(tmp_path, clock, max_bytes))


@pytest.fixture
def jobs(tmp_path: Path, clock: Clock) -> JobStore:
    return make_jobs(tmp_path, clock)


def create(jobs: JobStore, prompt: str = "a tram") -> VideoJob:
    return jobs.create(model="tiny", prompt=prompt, size="auto", seconds=None)


def owners(jobs: JobStore) -> list[str]:
    return [path.name for path in jobs.results.directory.path.glob(f"{OWNER}*")]


def test_a_job_is_seen_by_another_server_in_every_state(jobs, tmp_path, clock):
    other = make_jobs(tmp_path, clock)
    job = create(jobs)
    assert (other.find(job.id), job.status, job.progress, job.created_at) == (job, "queued", 0, 1000)
    job = jobs.advance(job, 40)
    assert (other.find(job.id), job.status) == (job, "in_progress")
    clock.now += 5
    job = jobs.complete(job, FILES, media_type="video/mp4", size="32x32", seconds=0.5)
    assert other.find(job.id) == job
    assert (job.status, job.progress, job.completed_at, job.expires_at) == ("completed", 100, 1005, 1065)
    assert {name: other.results.path(job.id, name).read_bytes() for name in FILES} == FILES


def test_a_complete_job_outlives_its_server_and_expires(jobs, tmp_path, clock):
    job = jobs.complete(create(jobs), FILES)
    jobs.close()
    again = make_jobs(tmp_path, clock)
    assert again.find(job.id) == job
    clock.now += 60
    assert again.find(job.id) is None
    again.sweep()
    assert again.results.directory.names() == []


def test_a_job_whose_server_has_ended_has_failed_and_says_why(jobs, tmp_path, clock):
    queued, running = create(jobs), jobs.advance(create(jobs), 30)
    jobs.close()
    again = make_jobs(tmp_path, clock)
    for job in (queued, running):
        found = again.find(job.id)
        assert (found.status, found.progress, found.expires_at) == ("failed", job.progress, 1060)
        assert found.error.message == "the server that ran it has ended before it was complete: create it again"
    assert owners(again) == [again.owner]


def _run_until_killed(path: Path, sender: "multiprocessing.connection.Connection") -> None:
    jobs = make_jobs(path, Clock())
    job = jobs.advance(create(jobs), 10)
    jobs.results.directory.put(job.id, "video", b"half of its frames")
    sender.send(job.id)
    signal.pause()


def test_the_job_of_a_killed_server_has_failed_and_leaves_no_files(jobs, tmp_path, clock):
    receiver, sender = multiprocessing.Pipe(duplex=False)
    server = multiprocessing.get_context("spawn").Process(target=_run_until_killed, args=(tmp_path, sender))
    server.start()
    assert receiver.poll(60)
    job_id = receiver.recv()
    assert jobs.find(job_id).status == "in_progress"
    assert len(owners(jobs)) == 2
    os.kill(server.pid, signal.SIGKILL)
    server.join()
    assert jobs.find(job_id).status == "failed"
    assert os.listdir(jobs.results.directory.path / job_id) == ["about.json"]
    jobs.sweep()
    assert owners(jobs) == [jobs.owner]


def test_a_job_that_its_own_server_no_longer_runs_has_failed(jobs):
    job = create(jobs)
    jobs._running.discard(job.id)
    assert jobs.find(job.id).status == "failed"


def test_a_failed_job_has_its_error(jobs, tmp_path, clock):
    error = JobError("bad_request", "size = 7: too small", "BadRequestError", "size")
    job = jobs.fail(create(jobs), error)
    found = make_jobs(tmp_path, clock).find(job.id)
    assert (found.status, found.error, found.expires_at) == ("failed", error, 1060)


def test_a_job_that_is_complete_does_not_fail_any_more(jobs):
    job = create(jobs)
    done = jobs.complete(job, FILES)
    assert jobs.fail(job, JobError("service_unavailable", "the server ends")) == done == jobs.find(job.id)
    assert jobs.results.path(job.id, "video").exists()


def test_a_job_is_deleted_once_by_any_server_and_its_owner_notices(jobs, tmp_path, clock):
    job = jobs.advance(create(jobs), 10)
    other = make_jobs(tmp_path, clock)
    assert (other.delete(job.id), other.delete(job.id)) == (True, False)
    with pytest.raises(JobGone):
        jobs.advance(job, 20)
    with pytest.raises(JobGone):
        jobs.complete(job, FILES)
    jobs.fail(job, JobError("x", "y"))
    assert jobs.results.directory.names() == []


def test_a_video_beyond_the_quota_is_not_stored(jobs):
    job = create(jobs)
    with pytest.raises(StorageFull):
        jobs.complete(job, {"video": bytes(20_000)})
    assert jobs.fail(job, JobError("service_unavailable", "full")).status == "failed"
    assert os.listdir(jobs.results.directory.path / job.id) == ["about.json"]


def test_a_job_is_not_created_without_room(tmp_path, clock):
    jobs = make_jobs(tmp_path, clock, max_bytes=10)
    with pytest.raises(StorageFull):
        create(jobs)
    assert jobs.results.directory.names() == []


def test_pages_are_in_the_order_of_creation_without_gaps(jobs, clock):
    made = [create(jobs, str(index)).id for index in range(5)]
    pages, after = [], None
    while True:
        page, has_more = jobs.page(2, after)
        pages.append([job.id for job in page])
        if not has_more:
            break
        after = page[-1].id
        jobs.delete(after)  # the next page starts behind it all the same
    assert pages == [made[:2:-1], [made[2], made[1]], [made[0]]]
    ascending, has_more = jobs.page(10, is_ascending=True)
    assert ([job.id for job in ascending], has_more) == ([made[0], made[2], made[4]], False)


def test_looking_for_a_path_finds_nothing(jobs):
    job = create(jobs)
    for name in (f"../files/{job.id}", f"{job.id}/", "", jobs.owner, f"{job.id}\0", job.id.upper()):
        assert jobs.find(name) is None
        assert not jobs.delete(name)
    assert jobs.find(job.id) == job


def test_what_a_job_takes_counts_and_what_another_server_deletes_makes_room(jobs, tmp_path, clock):
    other = make_jobs(tmp_path, clock)
    first = jobs.complete(create(jobs), {"video": bytes(6000)})
    second = create(other)
    with pytest.raises(StorageFull, match=r"results use 6,\d+ of 10,000 bytes"):
        other.complete(second, {"video": bytes(6000)})
    assert other.delete(first.id)
    assert jobs.find(other.complete(second, {"video": bytes(6000)}).id).status == "completed"
    with pytest.raises(StorageFull, match=r"results use 6,\d+ of 10,000 bytes"):
        jobs.results.add(bytes(6000), "image/png")
