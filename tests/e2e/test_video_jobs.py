"""Videos as jobs on real servers: two of one directory, one of which is killed, and the guide's program."""

import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.documents import ROOT, read_blocks
from tests.entrypoints.openai.test_media_routes import FILM, OTHER, WITH_PICTURE
from tests.media.test_video import decode
from tests.server import Server, serve, wait_for

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("jobs")


@pytest.fixture(scope="module")
def start(tiny_pipeline: Callable[[str], Path], directory: Path) -> Iterator[Callable[[str], Server]]:
    with ExitStack() as servers:
        yield lambda name: servers.enter_context(
            serve(
                tiny_pipeline("wan2.2-i2v"),
                directory / f"{name}.log",
                "--api-key=key",
                VLLM_OMNI_FILES_DIR=str(directory / "files"),
            )
        )


@pytest.fixture(scope="module")
def server(start: Callable[[str], Server]) -> Server:
    return start("first")


def ask(server: Server, method: str, path: str, **more: Any) -> httpx.Response:
    headers = {"Authorization": "Bearer key", **more.pop("headers", {})}
    return httpx.request(method, f"{server.url}/v1/videos{path}", headers=headers, timeout=60, **more)


def create(server: Server, **fields: Any) -> str:
    response = ask(server, "POST", "", json={**FILM, **WITH_PICTURE, **fields})
    assert response.status_code == 200, response.text
    return str(response.json()["id"])


def state_of(server: Server, video_id: str) -> dict[str, Any]:
    state: dict[str, Any] = ask(server, "GET", f"/{video_id}").json()
    return state


def wait_until_complete(server: Server, video_id: str) -> dict[str, Any]:
    wait_for(f"{video_id} is complete", lambda: state_of(server, video_id)["status"] == "completed", 60)
    return state_of(server, video_id)


def test_a_job_passes_through_its_states_and_is_fetched_in_ranges(server: Server) -> None:
    video = create(server, num_inference_steps=30)
    wait_until_complete(server, video)
    whole = ask(server, "GET", f"/{video}/content").content
    assert decode(whole)[0].shape == (5, 32, 32, 3)
    parts = [ask(server, "GET", f"/{video}/content", headers={"Range": one}) for one in ("bytes=0-99", "bytes=100-")]
    assert [part.status_code for part in parts] == [206, 206]
    assert b"".join(part.content for part in parts) == whole


def test_videos_need_the_key_and_addresses_of_files_a_signature(server: Server) -> None:
    assert httpx.get(f"{server.url}/v1/videos", timeout=60).status_code == 401
    signed = httpx.get(f"{server.url}/v1/files/file-1", params={"expires": 1, "signature": "x"}, timeout=60)
    assert signed.status_code == 403


def test_the_program_of_the_guide(server: Server, tmp_path: Path) -> None:
    (program,) = [block.text for block in read_blocks(ROOT / "docs" / "videos.md") if block.is_program]
    (tmp_path / "first.png").write_bytes(OTHER)
    adapted = program.replace("http://127.0.0.1:8000", server.url).replace('api_key="none"', 'api_key="key"')
    done = subprocess.run(
        [sys.executable, "-c", adapted], cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "completed 100"
    assert len(decode((tmp_path / "tram.mp4").read_bytes())[0]) == 9


def test_the_guide_names_every_setting(server: Server) -> None:
    from vllm_omni import envs

    named = set(re.findall(r"^\| `(VLLM_OMNI_\w+)` \| ([^|]+) \|", (ROOT / "docs" / "videos.md").read_text(), re.M))
    assert {name for name, _ in named} == {name for name in envs.VARIABLES if re.search(r"_FILE|VIDEO_JOBS", name)}


def test_deleting_a_job_that_runs_leaves_nothing_in_the_engine(server: Server) -> None:
    video = create(server, num_inference_steps=900)
    assert state_of(server, video)["status"] == "in_progress"
    assert ask(server, "DELETE", f"/{video}").json() == {"id": video, "object": "video.deleted", "deleted": True}
    assert server.holds_nothing()
    assert [ask(server, method, f"/{video}").status_code for method in ("GET", "DELETE")] == [404, 404]


def test_servers_share_jobs_and_one_sees_at_once_that_another_was_killed(
    server: Server, start: Callable[[str], Server]
) -> None:
    """Last: it kills the first server."""
    other = start("second")
    done = wait_until_complete(server, create(server))
    deleted, running = (create(server, num_inference_steps=900) for _ in range(2))
    assert state_of(other, done["id"]) == done
    assert {state_of(other, video)["status"] for video in (deleted, running)} == {"in_progress"}
    assert ask(other, "DELETE", f"/{deleted}").status_code == 200
    wait_for("its owner aborts the deleted job", lambda: server.metric("vllm_omni:num_open_calls") == 1)

    server.process.send_signal(signal.SIGKILL)
    server.process.wait(30)
    failed = state_of(other, running)
    assert (failed["status"], failed["error"]["code"]) == ("failed", "service_unavailable")
    assert "the server that ran it has ended before it was complete" in failed["error"]["message"]

    again = start("third")
    listed = {one["id"]: one["status"] for one in ask(again, "GET", "").json()["data"]}
    assert listed.items() >= {done["id"]: "completed", running: "failed"}.items()
    contents = [ask(one, "GET", f"/{done['id']}/content").content for one in (other, again)]
    assert contents[0] == contents[1] and decode(contents[0])[0].shape == (5, 32, 32, 3)
    assert wait_until_complete(again, create(again))["progress"] == 100
