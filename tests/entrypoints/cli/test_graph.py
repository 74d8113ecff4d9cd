"""``graph``: graphs of models and files, remarks and errors."""

import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from vllm_omni.entrypoints.cli.main import main

EXAMPLES = Path(__file__).resolve().parents[3] / "examples" / "graphs"
GOOD = """
from vllm_omni.flow import Field, Graph, Role, interface

class Echo(Role):
    run = interface(inputs_or=[["x"]], outputs={"y": Field("text")})

graph = Graph("echo")
graph.output(y=graph.role(Echo, "echo").run(x=graph.placeholder("x")).y)
"""
BAD = """
bad = Graph("bad")
bad.output(y=bad.role(Echo, "echo").run(x=bad.placeholder("x")).y)
bad.placeholder("unused")
"""


def write(directory: Path, text: str) -> str:
    path = directory / "graphs.py"
    path.write_text(text)
    return str(path)


def run(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, str, str]:
    code = 0
    try:
        main(["graph", *args])
    except SystemExit as exc:
        code = int(str(exc.code))
    out, err = capsys.readouterr()
    return code, out, err


def test_graph_of_a_model_is_printed(capsys: pytest.CaptureFixture[str], tiny_checkpoint: Path) -> None:
    code, out, _ = run(capsys, str(tiny_checkpoint))
    assert code == 0
    assert "rows <- thinker.generate.rows by thinker_to_talker()" in out


def test_graph_of_a_model_is_checked_with_a_deployment(
    capsys: pytest.CaptureFixture[str], tiny_checkpoint: Path, tmp_path: Path
) -> None:
    deployment = tmp_path / "deploy.yaml"
    deployment.write_text("stages: {talker: {max_num_seqs: 2}}\n")
    code, out, _ = run(capsys, str(tiny_checkpoint), "--deploy-config", str(deployment))
    assert (code, out) == (0, run(capsys, str(tiny_checkpoint))[1])
    for text, why in [
        (
            "stages: {talkr: {max_num_seqs: 2}}\n",
            "deploy.yaml:1: stages.talkr: no stage 'talkr': did you mean 'talker'",
        ),
        ("edges: {thinker->token2wav: {stream: true}}\n", "edge thinker->token2wav: the graph has no such edge"),
    ]:
        deployment.write_text(text)
        code, out, err = run(capsys, str(tiny_checkpoint), "--deploy-config", str(deployment))
        assert (code, out) == (2, "")
        assert why in err
    code, _, err = run(capsys, write(tmp_path, GOOD), "--deploy-config", str(deployment))
    assert (code, "--deploy-config: for a model" in err) == (2, True)


def test_a_graph_that_another_one_calls_is_printed_behind_it(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    calls = """
def make():
    graph.graph_call("say", ["y"])
    outer = Graph("outer")
    outer.output(y=outer.graph_ref(graph, "inner").say(x=outer.placeholder("x")).y)
    return outer
outer = make()
del graph
"""
    code, out, _ = run(capsys, write(tmp_path, GOOD + calls))
    assert code == 0
    assert [line for line in out.splitlines() if line.startswith("graph")] == ["graph outer", "graph echo"]
    assert "  inner.say (calls graph echo)" in out.splitlines()


def test_graphs_of_a_file_are_printed(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, out, _ = run(capsys, write(tmp_path, GOOD), "--format", "mermaid")
    assert (code, out.splitlines()[0]) == (0, "flowchart LR")


def test_every_example_is_printed_in_every_format(capsys: pytest.CaptureFixture[str]) -> None:
    for path in sorted(EXAMPLES.glob("*.py")):
        for form in () if path.stem == "standins" else ("text", "mermaid", "svg"):
            code, out, err = run(capsys, str(path), "--format", form)
            assert (code, err) == (0, ""), path
            assert out, path


def test_file_finds_its_neighbours_only_while_it_runs(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "the_neighbour.py").write_text(GOOD)
    before = list(sys.path)
    try:
        code, out, _ = run(capsys, write(tmp_path, "from the_neighbour import graph"))
    finally:
        sys.modules.pop("the_neighbour", None)
    assert (code, out.splitlines()[0]) == (0, "graph echo")
    assert sys.path == before


def test_remarks_of_the_checks_are_listed(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    unread = GOOD.replace('Field("text")}', 'Field("text"), "z": Field("text")}')
    code, out, _ = run(capsys, write(tmp_path, unread))
    assert (code, out.splitlines()[-1]) == (0, "  found: output 'z' of node 'echo.run' has no reader")


def test_svg_goes_to_a_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    svg = tmp_path / "graph.svg"
    assert run(capsys, write(tmp_path, GOOD), "--format", "svg", "--output", str(svg))[:2] == (0, "")
    assert ET.parse(svg).getroot().tag.endswith("svg")


def test_error_of_a_wrong_graph_follows_the_right_ones(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, out, err = run(capsys, write(tmp_path, GOOD + BAD))
    assert code == 1
    assert "graph echo" in out
    assert "placeholder 'unused' feeds no node" in err


def test_file_without_a_graph_is_rejected(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for text, complaint in [
        ("x = 1", "defines no Graph"),
        ("1 / 0", "ZeroDivisionError"),
        ("import nowhere", "No module named 'nowhere'"),
    ]:
        code, out, err = run(capsys, write(tmp_path, text))
        assert (code, out) == (2, ""), text
        assert complaint in err


def test_a_missing_source_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    for source in ("nowhere.py", "/nowhere/model"):
        code, _, err = run(capsys, source)
        assert code == 2
        assert source in err


def test_output_that_cannot_be_written_is_named(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, _, err = run(capsys, write(tmp_path, GOOD), "--output", str(tmp_path / "no" / "where"))
    assert code == 2
    assert "--output" in err


def test_graphs_of_a_given_pipeline_are_printed_and_checked(
    capsys: pytest.CaptureFixture[str], tiny_checkpoint: Path
) -> None:
    pipeline = "tests.e2e.graphs.pipelines:GraphsPipeline"
    code, out, _ = run(capsys, str(tiny_checkpoint), "--pipeline", pipeline)
    assert code == 0
    assert "diamond" in out and "critique" in out
    code, _, err = run(capsys, "graphs.py", "--pipeline", pipeline)
    assert (code, "--pipeline: for a model" in err) == (2, True)
