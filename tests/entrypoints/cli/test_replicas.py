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
    """Answers GET /replicas, and POST /drain until no request runs."""

    report: dict[str, Any]
    num_left = 1
    asked: list[tuple[str, Any, str | None]]


class Handler(BaseHTTPRequestHandler):
    server: Script

    def do_GET(self) -> None:
        self._answer(None, 200, self.server.report)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if body["engine"] != "talker/1":
            self._answer(body, 400, {"error": {"message": f"no engine {body['engine']!r}"}})
            return
        self._answer(body, 200, ENGINE | {"num_requests": self.server.num_left})
        self.server.num_left -= 1

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
    assert server.asked[0][1] == {"engine": "talker/1"}
    run(server, "undrain", "talker/1")
    assert server.asked[-1][:2] == ("/undrain", {"engine": "talker/1"})
    assert capsys.readouterr().out == "talker/1: drained\ntalker/1: drained\n"


def test_the_server_s_error_is_the_command_s(server: Script, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run(server, "drain", "talker/7")
    assert "no engine 'talker/7'" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["replicas", "--url", "http://127.0.0.1:1"])
    assert "http://127.0.0.1:1 cannot be reached" in capsys.readouterr().err
