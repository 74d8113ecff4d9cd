"""``vllm-omni bench load``, on small servers in this process."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from tests.entrypoints.bench.media_server import MediaServer, serve_media
from vllm_omni.entrypoints.cli.main import main


@pytest.fixture(scope="module")
def servers() -> Iterator[list[MediaServer]]:
    with serve_media() as one, serve_media() as other:
        yield [one, other]


def load(*flags: str) -> None:
    main(["bench", "load", *flags])


def fail(capsys: Any, *flags: str) -> str:
    with pytest.raises(SystemExit) as end:
        load(*flags)
    assert end.value.code
    return str(capsys.readouterr().err)


def test_rates_are_measured_one_after_another_and_drawn(
    servers: list[MediaServer], tmp_path: Path, capsys: Any
) -> None:
    result, plot = tmp_path / "load.json", tmp_path / "goodput.png"
    flags = ["--backend", "omni-speech", "--base-url", servers[0].url, "--rates", "40", "80", "--num-requests", "6"]
    load(*flags, "--goodput", "ttfa:100000", "gap:100000", "--result", str(result), "--plot", str(plot))
    printed = capsys.readouterr().out
    assert "40 requests/s: 6 requests, 1 run\n" in printed and "80 requests/s: 6 requests, 1 run\n" in printed
    assert "p50_ttfa_ms" in printed and "A/A" not in printed
    report = json.loads(result.read_text())
    assert [point["rate"] for point in report["points"]] == pytest.approx([40, 80])
    assert report["servers"] == {"A": {"url": servers[0].url, "model": "tiny"}}
    assert report["goodput"] == {"ttfa": 100000, "gap": 100000}
    (run,) = report["points"][0]["runs"]
    assert run["figures"]["media_goodput_share"] == 1.0 and run["errors"] == {} and run["late_ms"] >= 0
    assert report["points"][0]["medians"]["A"] == run["figures"]
    with Image.open(plot) as image:
        assert image.format == "PNG"


def test_two_servers_are_compared_beside_the_band(servers: list[MediaServer], tmp_path: Path, capsys: Any) -> None:
    result, number = tmp_path / "load.json", len(servers[1].requests)
    servers[1].fails = {number + 1 + 2 * index for index in range(3)}  # one of each run, after the first request
    flags = ["--backend", "omni-images", "--base-url", servers[0].url, "--base-url", servers[1].url]
    load(*flags, "--rates", "50", "--num-requests", "2", "--goodput", "e2el:100000", "--result", str(result))
    printed = capsys.readouterr().out
    assert "50 requests/s: 2 requests, 9 runs" in printed
    (header,) = [line for line in printed.splitlines() if line.startswith("FIGURE")]
    assert header.split() == ["FIGURE", "A", "B", "B/A", "A/A", "BAND"]
    (share,) = [line for line in printed.splitlines() if line.startswith("media_goodput_share")]
    assert share.split()[1:] == "1 0.5 0.500 1.000 to 1.000 outside: B is worse".split()
    assert "B: 3 requests failed: HTTP 429" in printed
    (point,) = json.loads(result.read_text())["points"]
    assert [run["server"] for run in point["runs"]] == list("ABAABAABA")
    failed = next(one for one in point["comparisons"] if one["name"] == "media_failed")
    assert (failed["a"], failed["b"], failed["ratio"], failed["verdict"]) == (0, 1, None, "outside: B is worse")


def test_a_trace_is_replayed_with_its_sizes(servers: list[MediaServer], tmp_path: Path) -> None:
    trace, number = tmp_path / "trace.jsonl", len(servers[0].requests)
    lines = [
        {"timestamp": 20, "prompt": "A dog.", "body": {"size": "64x64", "n": 2}},
        {"timestamp": 0, "input_length": 12},
    ]
    trace.write_text("".join(json.dumps(line) + "\n" for line in lines))
    flags = ["--backend", "omni-images", "--base-url", servers[0].url + "/", "--extra-body", '{"size": "32x32"}']
    load(*flags, "--trace", str(trace), "--trace-unit", "ms", "--api-key", "secret")
    first, second = servers[0].bodies[number + 1 :]
    assert len(first["prompt"].split()) == 12 and (first["size"], second["size"]) == ("32x32", "64x64")
    assert (second["prompt"], second["n"], second["model"]) == ("A dog.", 2, "tiny")
    assert servers[0].headers[-1]["Authorization"] == "Bearer secret"
    load(*flags, "--trace", str(trace), "--num-requests", "1")
    assert [body["prompt"] for body in servers[0].bodies[number + 3 :]] == [first["prompt"]] * 2  # one warms up


def test_a_server_that_rejects_the_first_request_ends_the_command(servers: list[MediaServer], capsys: Any) -> None:
    servers[0].fails = {len(servers[0].requests)}
    said = fail(capsys, "--backend", "omni-images", "--base-url", servers[0].url, "--rates", "1")
    assert "/v1/images/generations: the first request failed: HTTP 429" in said


def test_a_server_that_cannot_be_reached_ends_the_command(capsys: Any) -> None:
    flags = ["--backend", "omni-images", "--base-url", "http://127.0.0.1:9", "--rates", "1"]
    assert "http://127.0.0.1:9 cannot be reached: Connection refused" in fail(capsys, *flags)
    assert "the first request failed: " in fail(capsys, *flags, "--model", "tiny")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--rates", "1"], "the following arguments are required: --backend"),
        (["--backend", "omni-speach", "--rates", "1"], "did you mean 'omni-speech'"),
        (["--backend", "omni-speech"], "--rates or --trace is needed"),
        (["--backend", "omni-speech", "--rates", "0"], "'0': must be a number above 0"),
        (["--backend", "omni-speech", "--rates", "inf"], "'inf': must be a number above 0"),
        (["--backend", "omni-speech", "--rates", "1", "--repeats", "1.5"], "'1.5': must be an integer above 0"),
        (["--backend", "omni-speech", "--rates", "1", "--trace-unit", "ms"], "no effect without --trace"),
        (["--backend", "omni-speech", "--rates", "1", "--base-url", "localhost:1"], "must begin with http://"),
        (["--backend", "omni-speech", "--rates", "1", *["--base-url", "http://a"] * 3], "3 servers; two at most"),
        (["--backend", "omni-speech", "--rates", "1", "--extra-body", "[]"], "must be a JSON object"),
        (["--backend", "omni-speech", "--rates", "1", "--goodput", "ttfs:1"], "--goodput ttfs:1: did you mean"),
        (["--backend", "omni-speech", "--rates", "1", "--plot", "a.png"], "--plot needs --goodput"),
        (["--backend", "omni-speech", "--rates", "1", "--plot", "a.jpg"], "must end with .png"),
        (["--backend", "omni-speech", "--rates", "1", "--result", "no/where.json"], "its directory does not exist"),
        (["--backend", "omni-speech", "--trace", "none.jsonl"], "--trace none.jsonl: No such file"),
        (["--backend", "omni-speech", "--trace", "a", "--seed", "1"], "--seed has no effect with --trace"),
        (["--backend", "omni-speech", "--trace", "a", "--prompts", "b"], "--prompts has no effect with --trace"),
        (["--backend", "omni-speech", "--rate", "1", "--repeat", "2", "--goodputs", "a"], "did you mean '--goodput'"),
    ],
)
def test_wrong_arguments_are_rejected_before_anything_is_sent(flags: list[str], message: str, capsys: Any) -> None:
    assert message in fail(capsys, *flags)
