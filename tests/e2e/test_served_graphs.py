"""A loop over a language model, over HTTP; at the end, its server drains."""

import http.client
import json
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx
import openai
import psutil
import pytest

from tests.e2e.looping import FAILS, MAX_MODEL_LEN, NUM_ITERATIONS, REJECTS, TOO_LONG
from tests.entrypoints.openai.test_server import png
from tests.server import Server, install_pipeline, serve, wait_for
from vllm_omni.testing import llava

pytestmark = [pytest.mark.timeout(400), pytest.mark.long]  # units: tests/engine/test_{answer,node,orchestrator}.py

NUM_TOKENS = 8
QUESTION: list[Any] = [{"role": "user", "content": [{"type": "text", "text": "w3 w4 w5"}]}]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    directory = tmp_path_factory.mktemp("looping")
    deployment, path = install_pipeline(directory, "looping", "tests.e2e.looping:LoopingPipeline")
    flags = [deployment, "--dtype=float32", "--enforce-eager"]
    flags += [f"--max-model-len={MAX_MODEL_LEN}", "--shutdown-timeout=100"]
    with serve(
        llava.build(directory / "checkpoint"),
        directory / "log",
        *flags,
        PYTHONPATH=path,
        VLLM_SERVER_DEV_MODE="1",  # has /pause
    ) as server:
        yield server


def ask(server: Server, **more: Any) -> Any:
    params = {"model": "tiny", "messages": QUESTION, "max_tokens": NUM_TOKENS, "temperature": 0.0}
    return server.client.chat.completions.create(**params | {"extra_body": {"ignore_eos": True}} | more)


def test_a_streamed_loop_is_one_text_with_one_finish_reason_and_one_usage(server: Server) -> None:
    whole = ask(server)
    chunks = list(ask(server, stream=True, stream_options={"include_usage": True}))
    choices = [choice for chunk in chunks for choice in chunk.choices]
    assert "".join(choice.delta.content or "" for choice in choices) == whole.choices[0].message.content
    assert [choice.finish_reason for choice in choices if choice.finish_reason] == ["length"]
    (usage,) = [chunk.usage for chunk in chunks if chunk.usage]
    assert usage.completion_tokens == whole.usage.completion_tokens == NUM_ITERATIONS * NUM_TOKENS
    assert usage.prompt_tokens == whole.usage.prompt_tokens == ask(server, max_tokens=1).usage.prompt_tokens > 0


@pytest.mark.parametrize("seed", [REJECTS, FAILS])
def test_an_error_of_the_pipelines_own_code_is_a_500_with_the_stages_name(server: Server, seed: int) -> None:
    with pytest.raises(openai.InternalServerError, match=r"stage 'writer': its request could not be made.*draft"):
        ask(server, seed=seed)


def test_a_rejection_stays_one_although_another_node_already_reads_the_rejected(server: Server) -> None:
    with pytest.raises(openai.BadRequestError, match=f"stage 'writer': .*{MAX_MODEL_LEN}"):
        ask(server, seed=TOO_LONG, modalities=["text", "comment"])


class SlowImages(ThreadingHTTPServer):
    """A host of one picture, which it sends once ``may_answer`` is set."""

    def __init__(self) -> None:
        self.is_asked, self.may_answer = threading.Event(), threading.Event()
        super().__init__(("127.0.0.1", 0), SlowImage)


class SlowImage(BaseHTTPRequestHandler):
    server: SlowImages

    def do_GET(self) -> None:
        self.server.is_asked.set()
        self.server.may_answer.wait(100)
        self.send_response(200)
        self.end_headers()
        self.wfile.write(png())


@pytest.fixture
def images() -> Iterator[SlowImages]:
    with SlowImages() as images:
        threading.Thread(target=images.serve_forever).start()
        yield images
        images.may_answer.set()
        images.shutdown()


def test_a_server_that_is_told_to_end_finishes_its_requests_and_takes_no_others(
    server: Server, images: SlowImages
) -> None:
    """Its stages are told, too, as by a service manager. One request is generated, one waits since the server was
    paused, of one the picture is fetched, and one is still being uploaded.
    """
    num_tokens = 150
    stream = ask(server, stream=True, max_tokens=num_tokens, stream_options={"include_usage": True})
    chunks, logged = [next(stream), next(stream)], server.log.stat().st_size
    picture = {"type": "image_url", "image_url": {"url": f"http://127.0.0.1:{images.server_port}/image.png"}}
    body = json.dumps({"model": "tiny", "messages": QUESTION, "max_tokens": NUM_TOKENS}).encode()
    upload = http.client.HTTPConnection("127.0.0.1", httpx.URL(server.url).port, timeout=60)
    upload.putrequest("POST", "/v1/chat/completions")
    upload.putheader("Content-Type", "application/json")
    upload.putheader("Content-Length", str(len(body)))
    upload.endheaders(body[:10])
    with ThreadPoolExecutor() as pool:
        others = [pool.submit(ask, server, messages=[{"role": "user", "content": [picture, *QUESTION[0]["content"]]}])]
        assert images.is_asked.wait(20)
        assert server.post("/pause?mode=keep", None).status_code == 200
        others += [pool.submit(ask, server)]
        wait_for("the call to be open", lambda: server.metric("vllm_omni:num_open_calls") == 2)
        for process in (psutil.Process(server.process.pid), *psutil.Process(server.process.pid).children(True)):
            process.send_signal(signal.SIGTERM)
        wait_for("that it is no longer ready", lambda: server.get("/health").status_code == 503)
        for is_stream in (False, True):
            with pytest.raises(openai.InternalServerError, match="the server is shutting down") as rejected:
                ask(server, stream=is_stream)
            assert rejected.value.status_code == 503
        assert server.post("/resume", None).status_code == 200
        images.may_answer.set()
        upload.send(body[10:])
        assert upload.getresponse().status == 200
        assert all(other.result().usage.completion_tokens == NUM_ITERATIONS * NUM_TOKENS for other in others)
        chunks += list(stream)
    upload.close()
    assert chunks[-1].usage.completion_tokens == NUM_ITERATIONS * num_tokens
    server.process.wait(100)
    log = server.log.read_text()[logged:]
    assert "Traceback" not in log
    assert "restart in" not in log
