"""The requests of the documents, as they stand but for the server's address and the model's name."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import soundfile

from tests import machine
from tests.documents import ROOT, Block, read_blocks
from tests.server import Server


def adapt(text: str, server: Server) -> str:
    for address in ("http://127.0.0.1:8000", "http://localhost:8000"):
        text = text.replace(address, server.url)
    text = text.replace("ws://127.0.0.1:8000", server.url.replace("http", "ws", 1))
    return text.replace("Qwen/Qwen2.5-Omni-7B", "tiny")


def run_program(block: Block, server: Server, cwd: Path) -> str:
    result = subprocess.run(
        [sys.executable, "-c", adapt(block.text, server)], cwd=cwd, capture_output=True, text=True, timeout=120
    )
    assert result.returncode == 0, f"{block.document}:{block.line}\n{result.stderr}"
    return result.stdout


def program_of(document: str, part: str) -> Block:
    """The program of a document that has this part."""
    (program,) = [block for block in read_blocks(ROOT / document) if block.is_program and part in block.text]
    return program


def test_requests_by_curl(server: Server, tmp_path: Path) -> None:
    machine.require("curl")
    requests = [command for block in read_blocks(ROOT / "docs" / "http.md") for command in block.commands]
    requests = [command for command in requests if command[0] == "curl"]
    assert len(requests) == 3
    answers = []
    for command in requests:
        command = [adapt(word, server) for word in command]
        answers.append(subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, timeout=120).stdout)
    assert soundfile.info(tmp_path / "hello.mp3").frames >= 100 * 480
    assert json.loads(answers[1])["succeeded"] == 2
    assert answers[2].endswith(b"data: [DONE]\n\n")
    assert b'"audio":{' in answers[2]


def test_program_that_streams_speech(server: Server, tmp_path: Path) -> None:
    run_program(program_of("docs/http.md", "with_streaming_response"), server, tmp_path)
    assert soundfile.info(tmp_path / "hello.wav").samplerate == 24000


def test_program_that_streams_a_text(server: Server, tmp_path: Path) -> None:
    assert "speech.audio.done" in run_program(program_of("docs/http.md", "websockets"), server, tmp_path)
    samples, rate = soundfile.read(tmp_path / "streamed.wav")
    assert (rate, len(samples)) == (24000, 2 * 100 * 480)  # two sentences


@pytest.mark.long
def test_client_of_the_readme(server: Server, tmp_path: Path) -> None:
    assert run_program(program_of("README.md", "OpenAI"), server, tmp_path).strip()
