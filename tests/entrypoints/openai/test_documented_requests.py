"""The requests of the documents, as they stand but for the server's address and the model's name."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import soundfile

from tests import machine, zygote
from tests.documents import ROOT, Block, read_blocks
from tests.server import NUM_CODES, STAGES, Server, ask
from tests.shared_engines import QWEN_SERVER, SharedEngines
from vllm_omni.entrypoints.cli.main import main


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


def test_commands_that_show_traces(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    answer = ask(server.client, modalities=["text", "audio"])
    commands = [command for block in read_blocks(ROOT / "docs" / "latency.md") for command in block.commands]
    listing, writing = [command[1:] for command in commands if command[:2] == ["vllm-omni", "trace"]]
    main([*listing, "--url", server.url])
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith(answer.id)]
    assert "thinker" in line and "token2wav" in line
    main([answer.id if word.startswith("chatcmpl-") else word for word in writing] + ["--url", server.url])
    names = {event["name"] for event in json.loads((tmp_path / "trace.json").read_text())["traceEvents"]}
    assert {answer.id, "thinker", "talker", "token2wav"} <= names


def test_an_unknown_trace_ends_the_command_with_its_reason(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["trace", "nothing", "--url", server.url])
    assert "no request 'nothing' among the last 256" in capsys.readouterr().err


# -- the clients under load --------------------------------------------------------------------------------------------

BENCH = [words for block in read_blocks(ROOT / "docs" / "bench.md") for words in block.commands]
FEW_CODES = ["--extra-body", json.dumps({"max_new_tokens": NUM_CODES})]


def run_bench(server: Server, checkpoint: Path, cwd: Path, *flags: str) -> str:
    """``vllm bench serve`` with three prompts."""
    command = [str(Path(sys.executable).with_name("vllm")), "bench", "serve", *flags]
    command += ["--base-url", server.url, "--tokenizer", str(checkpoint), "--num-prompts", "3"]
    result = zygote.run(command, cwd=cwd, timeout=200)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.mark.long
def test_texts_are_measured_by_vllms_own_client(server: Server, engines: SharedEngines, tmp_path: Path) -> None:
    (command,) = [words for words in BENCH if words[1:3] == ["bench", "serve"] and "--omni" not in words]
    flags = [adapt(word, server) for word in command[3:]] + ["--save-result", "--result-filename", "texts.json"]
    run_bench(server, engines.directory(QWEN_SERVER) / "checkpoint", tmp_path, *flags)
    figures = json.loads((tmp_path / "texts.json").read_text())
    assert (figures["completed"], figures["failed"], figures["total_output_tokens"]) == (3, 0, 30)
    assert figures["median_ttft_ms"] > 0 and figures["median_tpot_ms"] > 0


def test_speech_is_measured_under_load(server: Server, engines: SharedEngines, tmp_path: Path) -> None:
    (command,) = [words for words in BENCH if words[:4] == ["vllm", "bench", "serve", "--omni"]]
    flags = [adapt(word, server) for word in command[3:]] + FEW_CODES
    printed = run_bench(server, engines.directory(QWEN_SERVER) / "checkpoint", tmp_path, *flags)
    figures = json.loads((tmp_path / "speech.json").read_text())
    assert (figures["media_completed"], figures["media_failed"]) == (3, 0)
    assert 0 < figures["p50_ttfa_ms"] <= figures["p95_ttfa_ms"]
    assert figures["audio_seconds_per_second"] > 0
    assert 0 <= figures["c50"] <= figures["c100"] <= 1
    assert "media_goodput" in printed


@pytest.mark.long
def test_rates_traces_and_two_servers_are_measured(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """With fewer requests, and this server in place of both."""
    monkeypatch.chdir(tmp_path)
    (trace,) = [block for block in read_blocks(ROOT / "docs" / "bench.md") if block.language == "json"]
    Path("trace.jsonl").write_text(trace.text)
    commands = [words for words in BENCH if words[:3] == ["vllm-omni", "bench", "load"]]
    assert len(commands) == 4
    for command in commands:
        words = [adapt(word.replace(":8001", ":8000"), server) for word in command[1:]]
        more = [] if "--base-url" in words else ["--base-url", server.url]
        main([*words, *more, *FEW_CODES, "--num-requests", "2"])
    printed = capsys.readouterr().out
    assert "requests failed" not in printed
    rates = ["1", "2", "4", "8", "2.5", "1", "2", "4"]  # of the trace by itself: one request each 0.4 s
    assert [line.partition(" requests/s")[0] for line in printed.splitlines() if "requests/s: " in line] == [
        *rates,
        "2",
    ]
    points = json.loads(Path("load.json").read_text())["points"] + json.loads(Path("trace.json").read_text())["points"]
    figures = [point["medians"]["A"] for point in points]
    assert [(one["media_completed"], one["media_failed"]) for one in figures] == [(2, 0)] * 5
    assert all(0 < one["p50_ttfa_ms"] <= one["p50_e2el_ms"] for one in figures)
    assert all(Path(name).stat().st_size > 1000 for name in ("goodput.png", "trace.png"))
    (ttfa,) = [line for line in printed.splitlines() if line.startswith("p50_ttfa_ms") and " to " in line]
    assert ttfa.endswith(("within the band", "B is better", "B is worse"))


def test_chats_with_speech_are_measured_under_load(server: Server, engines: SharedEngines, tmp_path: Path) -> None:
    checkpoint = engines.directory(QWEN_SERVER) / "checkpoint"
    flags = "--backend omni-chat --model tiny --dataset-name random --random-input-len 8 --random-output-len 6".split()
    flags += ["--extra-body", json.dumps({"sampling_params_list": STAGES}), "--media-result", "chat.json"]
    run_bench(server, checkpoint, tmp_path, "--omni", *flags)
    figures = json.loads((tmp_path / "chat.json").read_text())
    assert (figures["media_completed"], figures["media_failed"]) == (3, 0)
    assert figures["p50_rtf"] > 0


@pytest.mark.long
def test_a_server_that_rejects_the_first_request_ends_the_client(server: Server, engines: SharedEngines) -> None:
    """In a process of its own: vLLM leaves its session open then."""
    checkpoint = engines.directory(QWEN_SERVER) / "checkpoint"
    flags = "--omni --backend omni-images --model tiny --dataset-name random --num-prompts 1".split()
    command = [str(Path(sys.executable).with_name("vllm")), "bench", "serve", *flags, "--ready-check-timeout-sec", "1"]
    command += ["--tokenizer", str(checkpoint), "--base-url", server.url]
    result = zygote.run(command, timeout=200)
    assert result.returncode != 0
    assert "404" in result.stderr


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["latency"], "bench latency: valid: serve, load"),
        (["serve", "--backend", "omni-speech", "--media-goodput", "ttfa"], "must be a number above 0"),
        (["serve", "--backend", "openai", "--media-goodput", "ttfa:9"], "need a --backend of media: omni-chat"),
    ],
)
def test_wrong_flags_of_bench_end_it_with_their_reason(flags: list[str], message: str, capsys: Any) -> None:
    with pytest.raises(SystemExit) as raised:
        main(["bench", *flags])
    assert raised.value.code == 2
    assert message in capsys.readouterr().err
