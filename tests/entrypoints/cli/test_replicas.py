"""``vllm-omni replicas`` and ``drain`` against a server that answers from a script."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

from vllm_omni.entrypoints.cli.main import main

ENGINE = {
    "server": "box-1-aa",
    "engine": "talker/1",
    "address": "http://box:8000",
    "model": "tiny",
    "state": "drained",
    "reason": "it gets no new requests",
    "num_requests": 2,
    "work": 90.0,
    "num_restarts": 0,
}
TALKER_0 = ENGINE | {"engine": "talker/0", "state": "running", "reason": None, "num_requests": 0}


class Script(HTTPServer):
    """Answers GET /replicas, POST /drain, of which each ends a request, and /scale, of which each starts a replica."""

    report: dict[str, Any]
    num_left = 1
    scale: dict[str, Any]
    error: str | None = None  # of the next replica that starts
    asked: list[tuple[str, Any, str | None]]


class Handler(BaseHTTPRequestHandler):
    server: Script

    def do_GET(self) -> None:
        if self.path == "/scale":
            stage = self.server.scale
            stage["error"] = self.server.error
            stage["replicas"] += self.server.error is None and stage["replicas"] < stage["target"]
            self._answer(None, 200, {"stages": [stage], "autoscale": False})
            return
        self._answer(None, 200, self.server.report)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/scale":
            self.server.scale["target"] = body["replicas"]
            self._answer(body, 200, {})
            return
        if body["name"] == "box-c":
            self._answer(body, 200, {"engines": []})
            return
        if body["name"] not in ("talker/1", "box-b"):
            self._answer(body, 400, {"error": {"message": f"no engine or host {body['name']!r}"}})
            return
        names = ["talker/1", "vocoder/0"] if body["name"] == "box-b" else ["talker/1"]
        left = dict.fromkeys(names, 0) | {names[-1]: self.server.num_left}
        self._answer(
            body,
            200,
            {"engines": [ENGINE | {"engine": name, "num_requests": n, "is_idle": not n} for name, n in left.items()]},
        )
        self.server.num_left = max(self.server.num_left - 1, 0)

    def _answer(self, body: Any, status: int, answer: Any) -> None:
        self.server.asked.append((self.path, body, self.headers["Authorization"]))
        self.send_response(status)
        self.end_headers()
        self.wfile.write(json.dumps(answer).encode())

    def log_message(self, format: str, *args: Any) -> None: ...


@pytest.fixture
def server() -> Iterator[Script]:
    with Script(("127.0.0.1", 0), Handler) as server:
        server.asked, server.report = [], {"server": "box-1-aa", "replicas": [TALKER_0, ENGINE], "registry": None}
        server.scale = {
            "stage": "talker",
            "replicas": 1,
            "target": 1,
            "max_replicas": 4,
            "error": None,
            "proposal": None,
        }
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield server
        server.shutdown()


def run(server: Script, *args: str) -> None:
    main([*args, "--url", f"http://127.0.0.1:{server.server_port}"])


def test_each_engine_has_a_line(server: Script, capsys: pytest.CaptureFixture[str]) -> None:
    run(server, "replicas", "--api-key=secret")
    assert server.asked == [("/replicas", None, "Bearer secret")]
    output = capsys.readouterr()
    assert output.out.splitlines() == [
        "SERVER           MODEL  ENGINE    STATE    REQUESTS  RESTARTS  REASON",
        "http://box:8000  tiny   talker/0  running  0         0",
        "http://box:8000  tiny   talker/1  drained  2         0         it gets no new requests",
    ]
    assert not output.err


@pytest.mark.parametrize("age_s, said", [(None, "never answered"), (7.5, "other servers as of 7.5 s ago")])
def test_a_registry_that_is_away_is_reported(
    server: Script, age_s: float | None, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    server.report |= {"registry": {"url": "redis://r", "age_s": age_s, "error": "it does not answer"}}
    run(server, "replicas")
    assert capsys.readouterr().err == f"it does not answer; {said}\n"


def test_as_json_it_is_what_the_route_answers(server: Script, capsys: pytest.CaptureFixture[str]) -> None:
    run(server, "replicas", "--json")
    assert json.loads(capsys.readouterr().out) == server.report


def test_a_drain_waits_until_no_request_runs(
    server: Script, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vllm_omni.entrypoints.cli.drain.POLL_S", 0.0)
    run(server, "drain", "talker/1")
    assert [path for path, _, _ in server.asked] == ["/drain", "/drain"]
    assert server.asked[0][1] == {"name": "talker/1"}
    run(server, "undrain", "talker/1")
    assert server.asked[-1][:2] == ("/undrain", {"name": "talker/1"})
    assert capsys.readouterr().out == "talker/1: drained\ntalker/1: drained\n"


def test_a_host_is_drained_when_each_of_its_engines_is_idle(
    server: Script, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vllm_omni.entrypoints.cli.drain.POLL_S", 0.0)
    server.num_left = 3
    run(server, "drain", "box-b")
    assert server.asked == [("/drain", {"name": "box-b"}, None)] * 4
    assert capsys.readouterr().out == "talker/1: drained\nvocoder/0: drained\n"
    run(server, "drain", "box-c")
    assert capsys.readouterr().out == "box-c: no engine runs there\n"


def test_a_drain_whose_requests_do_not_end_in_time_fails_with_their_engine(
    server: Script, capsys: pytest.CaptureFixture[str]
) -> None:
    server.num_left = 3
    with pytest.raises(SystemExit) as raised:
        run(server, "drain", "box-b", "--timeout=0")
    assert raised.value.code == 1
    said = capsys.readouterr()
    assert said.out == "talker/1: drained\nvocoder/0: drained\n"
    assert "box-b: after 0 s, 3 requests still run on vocoder/0" in said.err


def test_scaling_waits_until_there_are_as_many_replicas(
    server: Script, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vllm_omni.entrypoints.cli.scale.POLL_S", 0.0)
    run(server, "scale", "talker=3", "--timeout=5")
    assert server.asked[0][:2] == ("/scale", {"stage": "talker", "replicas": 3, "timeout_s": 5.0})
    assert [path for path, _, _ in server.asked[1:]] == ["/scale"] * 2
    assert capsys.readouterr().out.splitlines()[1].split() == ["talker", "3", "3", "4"]
    server.scale["proposal"] = {"replicas": 4, "reason": "9 requests wait"}
    run(server, "scale")
    assert capsys.readouterr().out.splitlines()[1].split() == ["talker", "3", "3", "4", *"4 (9 requests wait)".split()]


def test_a_replica_that_does_not_start_is_the_command_s_error(
    server: Script, capsys: pytest.CaptureFixture[str]
) -> None:
    server.error = "it did not start: no memory"
    with pytest.raises(SystemExit):
        run(server, "scale", "talker=3")
    assert "talker: it did not start: no memory" in capsys.readouterr().err


@pytest.mark.parametrize("target", ["talker", "talker=", "=3", "talker=-1", "talker=two"])
def test_a_target_that_is_none_is_rejected(target: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as raised:
        main(["scale", target])
    assert raised.value.code == 2
    assert f"{target!r} is not STAGE=REPLICAS" in capsys.readouterr().err


def test_the_server_s_error_is_the_command_s(server: Script, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run(server, "drain", "talker/7")
    assert "no engine or host 'talker/7'" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["replicas", "--url", "http://127.0.0.1:1"])
    assert "http://127.0.0.1:1 cannot be reached" in capsys.readouterr().err
