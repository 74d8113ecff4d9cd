"""A loop over a language model, over HTTP; at the end, its server drains."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.e2e.looping import FAILS, MAX_MODEL_LEN, NUM_ITERATIONS, REJECTS, TOO_LONG
from tests.server import Server, serve, wait_for
from vllm_omni.testing import llava

pytestmark = [pytest.mark.timeout(400), pytest.mark.long]  # units: tests/engine/test_{answer,node,orchestrator}.py

NUM_TOKENS = 8
QUESTION = [{"role": "user", "content": [{"type": "text", "text": "w3 w4 w5"}]}]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    directory = tmp_path_factory.mktemp("looping")
    installed = directory / "looping-1.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: looping\nVersion: 1\n")
    (installed / "entry_points.txt").write_text("[vllm_omni.pipelines]\nlooping = tests.e2e.looping:LoopingPipeline\n")
    (directory / "looping.yaml").write_text("model_type: looping\n")
    flags = [f"--deploy-config={directory / 'looping.yaml'}", "--dtype=float32", "--enforce-eager"]
    flags += [f"--max-model-len={MAX_MODEL_LEN}", "--shutdown-timeout=100"]
    root = Path(__file__).resolve().parents[2]
    paths = [str(directory), str(root), os.environ.get("PYTHONPATH", "")]
    with serve(
        llava.build(directory / "checkpoint"), directory / "log", *flags, PYTHONPATH=os.pathsep.join(paths)
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
        ask(server, seed=TOO_LONG, modalities=["text", "audio"])


def test_a_server_that_is_told_to_end_finishes_its_requests_and_takes_no_others(server: Server) -> None:
    num_tokens = 150
    stream = ask(server, stream=True, max_tokens=num_tokens, stream_options={"include_usage": True})
    chunks, logged = [next(stream), next(stream)], server.log.stat().st_size
    server.process.send_signal(signal.SIGTERM)
    wait_for("that it is no longer ready", lambda: server.get("/health").status_code == 503)
    for is_stream in (False, True):
        with pytest.raises(openai.InternalServerError, match="the server is shutting down") as rejected:
            ask(server, stream=is_stream)
        assert rejected.value.status_code == 503
    chunks += list(stream)
    assert chunks[-1].usage.completion_tokens == NUM_ITERATIONS * num_tokens
    server.process.wait(100)
    assert "Traceback" not in server.log.read_text()[logged:]
