"""Videos as jobs over HTTP: their states, their files, their end; the engine's steps are the test's."""

import asyncio
import io
import logging
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest
from PIL import Image

from tests.entrypoints.openai.filming import FRAMES, Film, Studio, files_dir  # noqa: F401 (a fixture)
from tests.media.test_video import decode as decode_video
from vllm_omni.entrypoints.openai import video_jobs
from vllm_omni.errors import InvalidRequest, StageFailed

PICTURE = b"a picture, for all that this server knows"


@pytest.fixture
async def studio(files_dir: Path) -> AsyncIterator[Studio]:  # noqa: F811
    one = Studio()
    yield one
    await close(one)


def jobs_in(files_dir: Path) -> dict[str, set[str]]:  # noqa: F811
    """The folders of jobs, and the files in each."""
    return {folder.name: {file.name for file in folder.iterdir()} for folder in files_dir.glob("video_*")}


async def close(studio: Studio) -> None:
    for task in list(studio.results.running.values()):
        task.cancel()
    await studio.results.aclose()
    await studio.client.aclose()


def error_of(response: Any, status: int) -> dict[str, Any]:
    assert response.status_code == status, response.text
    error: dict[str, Any] = response.json()["error"]
    assert error["code"] == status
    return error


# -- states ------------------------------------------------------------------------------------------------------------


async def test_a_job_goes_from_queued_through_its_steps_to_complete(
    studio: Studio, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(video_jobs, "ADMISSION_S", 0.01)
    video = await studio.post(seconds=0.5, fps=8, size="48x32", negative_prompt="rain")
    assert video["created_at"] > 1_700_000_000
    assert video | {"id": "", "created_at": 0} == {
        "id": "", "object": "video", "status": "queued", "progress": 0, "model": "tiny", "prompt": "a tram",
        "size": "48x32", "seconds": "0.5", "created_at": 0, "completed_at": None, "expires_at": None, "error": None,
        "media_type": None, "remixed_from_video_id": None,
    }  # fmt: skip
    assert await studio.state(video) == video
    studio.film.put(0)
    await studio.until(video, status="in_progress", progress=0)
    studio.film.put(1)
    await studio.until(video, status="in_progress", progress=25)
    studio.film.put(4)
    await studio.until(video, status="in_progress", progress=99)
    studio.film.put(FRAMES)
    done = await studio.until(video, status="completed")
    assert (done["progress"], done["size"], done["seconds"], done["media_type"]) == (100, "48x32", "1", "video/mp4")
    assert done["created_at"] <= done["completed_at"] < done["expires_at"]


async def test_the_answer_to_a_job_that_starts_at_once_says_so(studio: Studio) -> None:
    studio.film.put(0)
    assert (await studio.post())["status"] == "in_progress"


async def test_a_job_asks_the_pipeline_for_its_start_and_its_steps(studio: Studio) -> None:
    studio.film.put(0)
    await studio.post(num_frames=8, seed=3)
    assert studio.film.given is not None
    params = studio.film.given[0].params()
    assert params == {"num_frames": 8, "seed": 3, "progress": True, "notify_start": True}


async def test_a_form_with_a_picture_makes_a_job(studio: Studio) -> None:
    forms: list[tuple[dict[str, str], dict[str, bytes], Any]] = [
        ({}, {"input_reference": PICTURE}, ("input_reference", PICTURE)),
        ({"input_reference[image_url]": "data:,x"}, {}, ("input_reference", "data:,x")),
        ({"image_reference": '{"image_url": "data:,x"}'}, {}, ("image_reference", "data:,x")),
    ]
    for fields, files, given in forms:
        studio.film.put(0)
        form = {"prompt": "a tram", "num_frames": "8", **fields}
        response = await studio.client.post("/v1/videos", data=form, files=files)
        assert response.status_code == 200, response.text
        assert studio.film.given is not None and studio.film.given[1].given == [given]


async def test_jobs_are_listed_by_age_in_pages(studio: Studio) -> None:
    videos = []
    for index in range(3):
        studio.film.put(0)
        videos.append(await studio.post(prompt=str(index)))
    ids = [video["id"] for video in videos]
    listed = (await studio.get("/v1/videos")).json()
    assert (listed["object"], listed["first_id"], listed["last_id"], listed["has_more"]) == (
        "list",
        ids[2],
        ids[0],
        False,
    )
    first = (await studio.get("/v1/videos", params={"limit": 2})).json()
    assert ([one["id"] for one in first["data"]], first["has_more"]) == ([ids[2], ids[1]], True)
    second = (await studio.get("/v1/videos", params={"limit": 2, "after": first["last_id"]})).json()
    assert ([one["id"] for one in second["data"]], second["has_more"]) == ([ids[0]], False)
    ascending = (await studio.get("/v1/videos", params={"order": "asc"})).json()
    assert [one["id"] for one in ascending["data"]] == ids


async def test_openais_client_makes_a_video(studio: Studio) -> None:
    client = openai.AsyncOpenAI(base_url="https://films.example/v1", api_key="none", http_client=studio.client)
    studio.film.put(0, FRAMES)
    with pytest.warns(DeprecationWarning):
        video = await client.videos.create_and_poll(prompt="a tram", seconds="4", size="720x1280", poll_interval_ms=10)
    assert (video.status, video.progress, video.size) == ("completed", 100, "48x32")
    with pytest.warns(DeprecationWarning):
        content = await client.videos.download_content(video.id)
        listed = [one.id async for one in client.videos.list(limit=1)]
        deleted = await client.videos.delete(video.id)
    assert decode_video(content.content)[0].shape == (8, 32, 48, 3)
    assert (listed, deleted.deleted, deleted.object) == ([video.id], True, "video.deleted")


# -- content -----------------------------------------------------------------------------------------------------------


async def test_the_content_is_the_video_or_small_pictures_of_it(studio: Studio) -> None:
    path = f"/v1/videos/{(await studio.complete())['id']}/content"
    video = await studio.get(path)
    assert video.headers["content-type"] == "video/mp4"
    assert decode_video(video.content)[0].shape == (8, 32, 48, 3)
    for variant, kind, size in (("thumbnail", "webp", (48, 32)), ("spritesheet", "jpeg", (4 * 48, 2 * 32))):
        picture = await studio.get(path, params={"variant": variant})
        assert picture.headers["content-type"] == f"image/{kind}"
        assert Image.open(io.BytesIO(picture.content)).size == size


async def test_the_job_makes_the_very_video_of_the_synchronous_route(studio: Studio) -> None:
    path = f"/v1/videos/{(await studio.complete(output_format='webm'))['id']}/content"
    studio.film.put(FRAMES)
    sync = await studio.client.post("/v1/videos/sync", json={"prompt": "a tram", "output_format": "webm"})
    assert (await studio.get(path)).content == sync.content


async def test_content_is_sent_in_ranges(studio: Studio) -> None:
    path = f"/v1/videos/{(await studio.complete())['id']}/content"
    whole = await studio.get(path)
    total = len(whole.content)
    assert whole.headers["accept-ranges"] == "bytes"
    for asked, start, end in (("bytes=10-19", 10, 20), ("bytes=100-", 100, total), ("bytes=-7", total - 7, total)):
        part = await studio.get(path, headers={"Range": asked})
        assert (part.status_code, part.content) == (206, whole.content[start:end])
        assert part.headers["content-range"] == f"bytes {start}-{end - 1}/{total}"
    beyond = await studio.get(path, headers={"Range": f"bytes={total}-"})
    assert f"the file has {total} bytes" in error_of(beyond, 416)["message"]
    assert beyond.headers["content-range"] == f"bytes */{total}"
    assert "bytes=FIRST-LAST" in error_of(await studio.get(path, headers={"Range": "bytes=9-3"}), 400)["message"]
    changed = {"Range": "bytes=0-1", "If-Range": '"of another file"'}
    assert (await studio.get(path, headers=changed)).status_code == 200
    head = await studio.client.head(path)
    assert (head.status_code, head.content, head.headers["content-length"]) == (200, b"", str(total))


async def test_a_job_that_is_not_complete_has_no_content(studio: Studio) -> None:
    studio.film.put(0, 1)
    video = await studio.post()
    await studio.until(video, progress=25)
    error = error_of(await studio.get(f"/v1/videos/{video['id']}/content"), 409)
    assert (error["param"], "in_progress, at 25 %" in error["message"]) == ("video_id", True)
    studio.film.put(StageFailed("diffusion", "died"))
    await studio.until(video, status="failed")
    error = error_of(await studio.get(f"/v1/videos/{video['id']}/content"), 404)
    assert "has failed, and has no content: stage 'diffusion': died" in error["message"]


# -- errors ------------------------------------------------------------------------------------------------------------

BAD: list[tuple[dict[str, Any], str, str]] = [
    ({"promt": "x"}, "promt", "did you mean 'prompt'"),
    ({"size": "64"}, "size", "must be 'auto' or WIDTHxHEIGHT"),
    ({"seconds": 1, "num_frames": 8}, "seconds", "cannot be combined"),
    ({"seconds": 0}, "seconds", "greater than 0"),
    ({"output_format": "mpeg"}, "output_format", "unknown video format"),
    ({"input_reference": {"file_id": "x"}}, "input_reference", "must have an image_url"),
    ({"input_reference": 5}, "input_reference", "must have an image_url"),
    ({"image_reference": "x"}, "image_reference", "must be an object in JSON"),
    ({"prompt": None}, "prompt", "valid string"),
]


async def test_a_bad_field_is_rejected_by_name_and_leaves_no_job(studio: Studio) -> None:
    for change, param, reason in BAD:
        response = await studio.client.post("/v1/videos", json={"prompt": "a tram", **change})
        error = error_of(response, 400)
        assert (error["param"], reason in error["message"]) == (param, True), (change, error)
    assert (await studio.get("/v1/videos")).json()["data"] == []


async def test_a_body_of_another_media_type_is_rejected(studio: Studio) -> None:
    response = await studio.client.post("/v1/videos", content=b"x", headers={"content-type": "text/plain"})
    assert "must be application/json or multipart/form-data" in error_of(response, 400)["message"]


async def test_what_the_engine_rejects_at_once_is_an_error_of_the_request(studio: Studio) -> None:
    studio.film.put(InvalidRequest("size: height = 7: must be a multiple of 16", param="size"))
    response = await studio.client.post("/v1/videos", json={"prompt": "a tram"})
    assert error_of(response, 400)["param"] == "size"
    assert (await studio.get("/v1/videos")).json()["data"] == []
    assert not studio.results.running


@pytest.mark.parametrize(
    ("raised", "code", "kind", "param"),
    [
        (InvalidRequest("n: too many", param="n"), "bad_request", "BadRequestError", "n"),
        (StageFailed("diffusion", "died"), "internal_server_error", "InternalServerError", None),
        (RuntimeError("a defect"), "internal_server_error", "InternalServerError", None),
    ],
    ids=["invalid", "failed", "defect"],
)  # fmt: skip
async def test_what_fails_later_is_an_error_of_the_job(
    studio: Studio, raised: Exception, code: str, kind: str, param: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    studio.film.put(0)
    video = await studio.post()
    studio.film.put(raised)
    failed = await studio.until(video, status="failed")
    assert failed["error"] | {"message": ""} == {"code": code, "message": "", "type": kind, "param": param}
    assert failed["expires_at"] is not None
    assert [bool(one.exc_info) for one in caplog.records if one.levelno >= logging.WARNING] == [code != "bad_request"]


async def test_an_unknown_video_is_a_404_on_every_route(studio: Studio) -> None:
    for name in ("video_1", "sync", "..%2Fvideo", "%00", f"video_{'0' * 32}"):
        for method, path in (("GET", ""), ("GET", "/content"), ("DELETE", "")):
            response = await studio.client.request(method, f"/v1/videos/{name}{path}")
            error = error_of(response, 404)
            assert error["message"].startswith("there is no"), (name, error)


async def test_an_unknown_parameter_of_a_query_is_rejected_with_the_nearest(studio: Studio) -> None:
    video = await studio.complete()
    content = f"/v1/videos/{video['id']}/content"
    for path, query, param, reason in (
        ("/v1/videos", {"limt": "1"}, "limt", "did you mean 'limit'"),
        ("/v1/videos", {"limit": "0"}, "limit", "greater than or equal to 1"),
        ("/v1/videos", {"order": "down"}, "order", "'asc' or 'desc'"),
        (content, {"varient": "x"}, "varient", "did you mean 'variant'"),
        (content, {"variant": "audio"}, "variant", "'video', 'thumbnail' or 'spritesheet'"),
    ):
        error = error_of(await studio.get(path, params=query), 400)
        assert (error["param"], reason in error["message"]) == (param, True), error


async def test_a_model_without_videos_makes_no_job(files_dir: Path) -> None:  # noqa: F811
    studio = Studio(Film("image"))
    error = error_of(await studio.client.post("/v1/videos", json={"prompt": "a tram"}), 400)
    assert "the output of this model is image, not video: POST /v1/images/generations" in error["message"]
    await close(studio)


# -- deletion ----------------------------------------------------------------------------------------------------------


async def test_deleting_a_job_that_runs_aborts_it_in_the_engine(studio: Studio, files_dir: Path) -> None:  # noqa: F811
    studio.film.put(0)
    video = await studio.post()
    deleted = await studio.client.delete(f"/v1/videos/{video['id']}")
    assert deleted.json() == {"id": video["id"], "object": "video.deleted", "deleted": True}
    assert (studio.film.running, studio.film.aborted) == ([], ["a tram"])
    for method in ("GET", "DELETE"):
        error_of(await studio.client.request(method, f"/v1/videos/{video['id']}"), 404)
    assert not jobs_in(files_dir)
    assert not studio.results.running


async def test_deleting_a_complete_job_removes_its_files(studio: Studio, files_dir: Path) -> None:  # noqa: F811
    video = await studio.complete()
    assert jobs_in(files_dir) == {video["id"]: {"about.json", "spritesheet", "thumbnail", "video"}}
    assert (await studio.client.delete(f"/v1/videos/{video['id']}")).status_code == 200
    assert not jobs_in(files_dir)


async def test_a_job_is_deleted_by_another_server_and_aborted_with_its_next_step(
    studio: Studio, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "vllm_omni")
    other = Studio()
    studio.film.put(0)
    video = await studio.post()
    assert (await other.client.delete(f"/v1/videos/{video['id']}")).status_code == 200
    task = studio.results.running[video["id"]]
    studio.film.put(1)
    await asyncio.wait([task], timeout=10)
    assert studio.film.aborted == ["a tram"]
    assert "has been deleted: it is aborted" in caplog.text
    await close(other)


async def test_a_client_that_leaves_before_it_knows_the_job_leaves_none(studio: Studio) -> None:
    body = {"type": "http.request", "body": b'{"prompt": "a tram"}', "more_body": False}
    messages = iter([body])

    async def receive() -> dict[str, Any]:
        if (message := next(messages, None)) is not None:
            return message
        await studio.film.has_started.wait()
        return {"type": "http.disconnect"}

    async def send(_: Any) -> None:
        pass

    scope = {
        "type": "http",
        "method": "POST",
        "path": "/v1/videos",
        "query_string": b"",
        "headers": [],
        "root_path": "",
    }
    async with asyncio.timeout(60):
        await studio.app(scope, receive, send)
        await asyncio.gather(*studio.results.running.values(), return_exceptions=True)
    assert studio.film.aborted == ["a tram"]
    assert (await studio.get("/v1/videos")).json()["data"] == []


# -- limits, restarts --------------------------------------------------------------------------------------------------


async def test_jobs_beyond_the_limit_are_rejected_until_one_has_ended(
    files_dir: Path,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("VLLM_OMNI_MAX_VIDEO_JOBS", "2")
    studio = Studio()
    studio.film.put(0, 0)
    first, _ = [await studio.post(), await studio.post()]
    response = await studio.client.post("/v1/videos", json={"prompt": "a tram"})
    assert (
        "2 videos are not complete, which is the limit (VLLM_OMNI_MAX_VIDEO_JOBS)" in error_of(response, 429)["message"]
    )
    assert response.headers["retry-after"] == "10"
    await studio.client.delete(f"/v1/videos/{first['id']}")
    studio.film.put(0)
    await studio.post()
    await close(studio)


async def test_a_job_is_rejected_where_its_video_has_no_room(
    files_dir: Path,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("VLLM_OMNI_MAX_FILE_BYTES", "1000")
    studio = Studio()
    studio.film.put(0, FRAMES)
    failed = await studio.until(await studio.post(), status="failed")
    assert failed["error"]["code"] == "service_unavailable"
    assert "VLLM_OMNI_MAX_FILE_BYTES" in failed["error"]["message"]
    monkeypatch.setenv("VLLM_OMNI_MAX_FILE_BYTES", "10")
    full = Studio()
    error_of(await full.client.post("/v1/videos", json={"prompt": "a tram"}), 503)
    assert not full.film.running
    for one in (studio, full):
        await close(one)


async def test_the_jobs_of_a_server_that_has_ended_are_there_after_a_restart(studio: Studio) -> None:
    done = await studio.complete()
    studio.film.put(0, 1)
    running = await studio.until(await studio.post(), progress=25)
    studio.requests.end()
    studio.film.put(StageFailed("diffusion", "the server is shutting down"))
    await studio.results.aclose()
    again = Studio()
    assert await again.state(done) == done
    assert (await again.get(f"/v1/videos/{done['id']}/content")).status_code == 200
    assert (await again.state(running))["status"] == "failed"
    assert len((await again.get("/v1/videos")).json()["data"]) == 2
    await close(again)


async def test_a_job_is_one_of_the_servers_requests_until_it_has_ended(studio: Studio) -> None:
    studio.film.put(0)
    video = await studio.post()
    studio.requests.drain()
    drained = asyncio.ensure_future(studio.requests.wait_until_none())
    rejected = await studio.client.post("/v1/videos", json={"prompt": "another"})
    assert error_of(rejected, 503)["message"] == "the server is shutting down"
    assert not drained.done()
    studio.film.put(FRAMES)
    await drained
    assert (await studio.until(video, status="completed"))["progress"] == 100


async def test_a_server_without_a_directory_starts_and_makes_no_jobs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.delenv("VLLM_OMNI_FILES_DIR")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    studio = Studio()
    error = error_of(await studio.client.post("/v1/videos", json={"prompt": "a tram"}), 503)
    assert "set VLLM_OMNI_FILES_DIR to a writable one" in error["message"]
    studio.film.put(FRAMES)
    assert (await studio.client.post("/v1/videos/sync", json={"prompt": "a tram"})).status_code == 200
    await close(studio)
