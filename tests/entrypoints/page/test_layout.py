"""The drawing of graphs, in a browser: boxes beside one another, edges around them."""

import runpy
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from vllm_omni.entrypoints.page.model import describe_plan
from vllm_omni.flow import GraphParser

if TYPE_CHECKING:
    from playwright.sync_api import Page

EXAMPLES = Path(__file__).resolve().parents[3] / "examples" / "graphs"
NAMES = sorted(path.stem for path in EXAMPLES.glob("*.py") if path.stem not in ("standins", "prefill_decode"))
PLACE = """async ([boxes, edges, isVertical]) => {
  const { place } = await import("/omni/static/layout.js");
  const size = place(boxes, edges, isVertical);
  const passed = edges.flatMap(({ cells }) => cells.filter(({ isPass }) => isPass));
  return { size, boxes, passed, paths: edges.map(({ path }) => path) };
}"""


def graph_of(name: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return describe_plan(GraphParser(runpy.run_path(str(EXAMPLES / f"{name}.py"))["graph"]).parse())


@pytest.mark.parametrize("is_vertical", [False, True], ids=["wide", "narrow"])
@pytest.mark.parametrize("name", NAMES)
def test_no_box_lies_on_another_or_on_an_edge_that_passes(
    page: "Page", monkeypatch: pytest.MonkeyPatch, name: str, is_vertical: bool
) -> None:
    graph = graph_of(name, monkeypatch)
    for edge in graph["edges"]:
        edge["source"] = edge["source"] or f"in {edge['source_field']}"
        edge["target"] = edge["target"] or f"out {edge['target_field']}"
    ids = {end: None for edge in graph["edges"] for end in (edge["source"], edge["target"])}
    boxes = [{"id": one, "width": 160, "height": 90} for one in ids]
    made = page.evaluate(PLACE, [boxes, graph["edges"], is_vertical])
    assert len(made["boxes"]) >= len(graph["nodes"]) + 2
    for one in made["boxes"]:
        assert one["x"] >= 0 and one["x"] + one["width"] <= made["size"]["width"]
        assert one["y"] >= 0 and one["y"] + one["height"] <= made["size"]["height"]
    for one, other in combinations([*made["boxes"], *made["passed"]], 2):
        is_beside = one["x"] + one["width"] <= other["x"] or other["x"] + other["width"] <= one["x"]
        is_below = one["y"] + one["height"] <= other["y"] or other["y"] + other["height"] <= one["y"]
        assert is_beside or is_below, (one, other)
    assert all(path.startswith("M") and "NaN" not in path for path in made["paths"])
