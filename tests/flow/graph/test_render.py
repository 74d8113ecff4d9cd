import random
import re
import runpy
import xml.etree.ElementTree as ET
from itertools import pairwise
from pathlib import Path

import pytest

from tests.flow.builders import Talker, Thinker, make_speech_plan
from tests.flow.random_graphs import make_case
from tests.fuzz import seeds
from vllm_omni.errors import GraphError
from vllm_omni.flow import Chunk, Field, Graph, GraphParser, Role, Scheduling, StaticPlan, interface
from vllm_omni.flow.graph.render import to_mermaid, to_svg, to_text

STREAM = Field("text", streamed=True)
SVG = "{http://www.w3.org/2000/svg}"
EXAMPLES = Path(__file__).resolve().parents[3] / "examples" / "graphs"


async def halve(chunks, call):
    async for chunk in chunks:
        yield Chunk(chunk.payload)


@pytest.fixture
def plan():
    return make_speech_plan(to_talker=halve)


def test_text_lists_every_field_and_its_source(plan):
    assert to_text(plan) == (
        "graph speech\n"
        "  takes prompt\n"
        "  thinker.generate\n"
        "    prompt <- prompt\n"
        "    text -> text, streamed\n"
        "    rows -> hidden_states, float, streamed\n"
        "  talker.generate\n"
        "    rows <- thinker.generate.rows by halve()\n"
        "    codes -> codec, streamed\n"
        "  token2wav.decode\n"
        "    codes <- talker.generate.codes\n"
        "    audio -> audio\n"
        "  gives text = thinker.generate.text\n"
        "  gives audio = token2wav.decode.audio\n"
        "  gives codec_ids = talker.generate.codes\n"
    )


def test_mermaid_has_an_arrow_for_each_edge_and_thick_ones_for_streams(plan):
    lines = to_mermaid(plan).splitlines()
    assert lines[0] == "flowchart LR"
    assert '  n0 ==>|"rows: halve()"| n1' in lines
    assert "  n2 --> out_audio" in lines
    assert sum("-->" in line or "==>" in line for line in lines) == len(plan.edges)


def test_svg_draws_every_node_and_edge_within_its_frame(plan):
    root = ET.fromstring(to_svg(plan))
    boxes = root.findall(f"{SVG}rect")
    assert len(boxes) == len(plan.nodes) + len(plan.placeholders) + len(plan.outputs)
    assert len(root.findall(f"{SVG}path")) == len(plan.edges)
    for box in boxes:
        assert float(box.get("x")) + float(box.get("width")) <= float(root.get("width"))
        assert float(box.get("y")) + float(box.get("height")) <= float(root.get("height"))


def boxes_of(root):
    """Left, top, right, bottom."""
    numbers = [[float(box.get(name)) for name in ("x", "y", "width", "height")] for box in root.findall(f"{SVG}rect")]
    return [(x, y, x + width, y + height) for x, y, width, height in numbers]


def texts_of(root):
    """Left, top, right, bottom, in the font that the layout reckons with."""
    for text in root.iter(f"{SVG}text"):
        size = 11 if text.get("class") else 13
        x, y, width = float(text.get("x")), float(text.get("y")), 0.61 * size * len(text.text)
        left = x - width * {"start": 0, "middle": 0.5, "end": 1}[text.get("text-anchor", "start")]
        yield left, y - 0.75 * size, left + width, y + 2


def is_apart(a, b):
    return a[2] <= b[0] or b[2] <= a[0] or a[3] <= b[1] or b[3] <= a[1]


def is_within(a, b):
    return b[0] <= a[0] and a[2] <= b[2] and b[1] <= a[1] and a[3] <= b[3]


def test_svg_edges_go_to_the_right(plan):
    for path in ET.fromstring(to_svg(plan)).findall(f"{SVG}path"):
        start, end = (point.strip("MLCQ").split(",") for point in (path.get("d").split()[0], path.get("d").split()[-1]))
        assert float(start[0]) < float(end[0])


def points_of(path):
    """Some points along it."""
    at = None
    for command, numbers in re.findall(r"([MLCQ])([^MLCQ]*)", path.get("d")):
        corners = [tuple(map(float, point.split(","))) for point in numbers.split()]
        for step in range(1, 21) if command != "M" else ():
            curve = [at, *corners]
            while len(curve) > 1:
                curve = [tuple(u + (v - u) * step / 20 for u, v in zip(a, b, strict=True)) for a, b in pairwise(curve)]
            yield curve[0]
        at = corners[-1]


def check_layout(svg):
    root = ET.fromstring(svg)
    boxes, texts = boxes_of(root), list(texts_of(root))
    assert all(is_apart(a, b) for index, a in enumerate(boxes) for b in boxes[:index])
    assert all(is_apart(a, b) for index, a in enumerate(texts) for b in texts[:index])
    assert all(is_apart(text, box) or is_within(text, box) for text in texts for box in boxes)
    whole = (0, 0, float(root.get("width")), float(root.get("height")))
    assert all(is_within(each, whole) for each in (*boxes, *texts))
    filled = [*texts, *((left + 1, top + 1, right - 1, bottom - 1) for left, top, right, bottom in boxes)]
    for path in root.findall(f"{SVG}path"):
        points = [(x, y, x, y) for x, y in points_of(path)]
        assert all(is_apart(point, each) and is_within(point, whole) for point in points for each in filled)


@pytest.mark.fuzz
def test_nothing_overlaps_in_the_svg_of_a_random_graph():
    for seed in seeds(200, first=0):
        try:
            plan = GraphParser(make_case(random.Random(seed)).graph).parse()
        except GraphError:
            continue
        try:
            check_layout(to_svg(plan))
        except AssertionError as exc:
            raise AssertionError(f"FUZZ_SEED={seed}") from exc


def test_names_are_escaped():
    graph = Graph("<a & b>")
    reply = graph.role(Thinker, "x<y").generate(prompt=graph.placeholder("prompt"))
    graph.output(codes=graph.role(Talker, "talker").generate(rows=reply.rows).codes)
    assert "x<y.generate" in "".join(ET.fromstring(to_svg(GraphParser(graph).parse())).itertext())


def example(monkeypatch, name) -> StaticPlan:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return GraphParser(runpy.run_path(str(EXAMPLES / f"{name}.py"))["graph"]).parse()


@pytest.mark.parametrize("name", sorted(path.stem for path in EXAMPLES.glob("*.py") if path.stem != "standins"))
def test_every_example_renders(monkeypatch, name):
    plan = example(monkeypatch, name)
    assert all(node in to_text(plan) and node in to_mermaid(plan) for node in plan.nodes)
    check_layout(to_svg(plan))


def test_text_marks_the_root_of_a_join(monkeypatch):
    text = to_text(example(monkeypatch, "interleaved"))
    assert (
        "    on vit + vae: per frame of parser.parse\n"
        "      vit <- vit.encode.rows (critical)\n"
        "      vae <- vae.encode.rows (critical)\n"
    ) in text
    assert "    on text: direct\n      text <- embedding.embed.rows\n" in text


def test_text_marks_an_edge_that_is_per_frame(monkeypatch):
    assert "    image <- parser.parse.image (per frame)\n" in to_text(example(monkeypatch, "interleaved"))


def test_text_lists_a_session_and_its_parameters(monkeypatch):
    text = to_text(example(monkeypatch, "interleaved"))
    assert "  llm.generate (session, ordered per frame of parser.parse)\n" in text
    assert "  shares cache in a session: llm\n" in text


def test_text_marks_a_loop_and_its_bound(monkeypatch):
    text = to_text(example(monkeypatch, "agent"))
    assert "  thinker.think (at most 3 iterations)\n" in text
    assert ("    on results: an iteration of loop 0\n      results <- tool.run.result (critical, loop 0)\n") in text


def test_text_lists_the_counts_of_a_node(monkeypatch):
    text = to_text(example(monkeypatch, "hunyuan_image"))
    assert "    on text + vit x num_images + vae x num_images + num_images: by count, once a call\n" in text


def test_text_marks_first_wins(monkeypatch):
    text = to_text(example(monkeypatch, "speculative"))
    assert "  judge.take (first wins)\n    on fast: once a call\n" in text


class Worker(Role):
    work = interface([["x"]], {"y": Field("text"), "z": Field("text")}, scheduling=Scheduling.ROUND_ROBIN)


class Pair(Role):
    take = interface([["a", "b"]], {"y": Field("text")})


def make_pair_plan() -> StaticPlan:
    """Two workers into a pair, whose ``a`` has two sources; ``z`` of the second has no reader."""
    graph = Graph("pair")
    x = graph.placeholder("x")
    first, second = graph.role(Worker, "first").work(x=x), graph.role(Worker, "second").work(x=x)
    pair = graph.role(Pair, "pair")
    both = pair.take(a=first.y, b=second.y)
    pair.take(a=first.z)
    graph.output(y=both.y, z=first.z)
    graph.graph_call("both", ["y", "z"], until=["y"])
    graph.graph_call("one", ["y"])
    return GraphParser(graph).parse()


FOUND = "found: output 'z' of node 'second.work' has no reader"


def test_only_the_sole_source_of_a_field_is_critical():
    text = to_text(make_pair_plan())
    assert "      a <- first.work.y\n      a <- first.work.z\n      b <- second.work.y (critical)\n" in text


def test_text_marks_scheduling_other_than_the_default():
    assert "  first.work (round robin)\n" in to_text(make_pair_plan())


def test_text_lists_graph_calls():
    assert "  call both gives y, z, until y\n  call one gives y\n" in to_text(make_pair_plan())


def test_findings_are_listed_at_the_end_of_each_format():
    plan = make_pair_plan()
    assert to_text(plan).splitlines()[-1] == f"  {FOUND}"
    assert to_mermaid(plan).splitlines()[-1] == f"  %% {FOUND}"
    assert next(ET.fromstring(to_svg(plan)).iterfind(f"{SVG}text[@class='label finding']")).text == FOUND


def test_mermaid_draws_a_loop_dotted(monkeypatch):
    lines = to_mermaid(example(monkeypatch, "agent")).splitlines()
    assert '  n1 -.->|"loop 0: result as results"| n0' in lines
    assert "  class n0 header" in lines


def test_mermaid_labels_an_edge_that_is_per_frame(monkeypatch):
    assert '  n0 ==>|"each calls"| n1' in to_mermaid(example(monkeypatch, "agent")).splitlines()


def test_mermaid_marks_joins_sessions_and_critical_edges(monkeypatch):
    plan = example(monkeypatch, "interleaved")
    lines = to_mermaid(plan).splitlines()
    assert any(line.startswith('  n4{{"llm.generate<br/>') for line in lines)
    assert {"  class n4 join", "  class n4 session"} <= set(lines)
    arrows = [line for line in lines if "->" in line or "=>" in line]
    (style,) = [line.split()[1] for line in lines if line.startswith("  linkStyle")]
    assert [arrows[int(index)] for index in style.split(",")] == [
        '  n2 -->|"rows as vit"| n4',
        '  n3 -->|"rows as vae"| n4',
    ]


def test_mermaid_escapes_what_would_end_a_label():
    graph = Graph("g")
    reply = graph.role(Thinker, '"a" #1').generate(prompt=graph.placeholder("prompt"))
    graph.output(text=reply.text, rows=reply.rows)
    assert '  n0["#quot;a#quot; #35;1.generate"]' in to_mermaid(GraphParser(graph).parse()).splitlines()


def test_svg_of_a_loop_goes_back_below_the_boxes(monkeypatch):
    root = ET.fromstring(to_svg(example(monkeypatch, "agent")))
    (back,) = root.findall(f"{SVG}path[@class='back critical']")
    points = [tuple(map(float, point.strip("MLCQ").split(","))) for point in back.get("d").split()]
    (header,) = root.findall(f"{SVG}rect[@class='node header']")
    top, bottom = float(header.get("y")), float(header.get("y")) + float(header.get("height"))
    assert points[-1][0] < points[0][0]
    assert 0 < float(header.get("x")) - points[-1][0] < 10  # room for the arrow
    assert top < points[-1][1] < bottom
    assert max(y for _, y in points) > max(bottom for *_, bottom in boxes_of(root))


def test_svg_marks_joins_and_sessions(monkeypatch):
    root = ET.fromstring(to_svg(example(monkeypatch, "interleaved")))
    assert len(root.findall(f"{SVG}rect[@class='node join session']")) == 1
    assert len(root.findall(f"{SVG}path[@class='critical']")) == 2
    assert len(root.findall(f"{SVG}path[@class='streamed each']")) == 3


@pytest.mark.parametrize(
    "name, marks",
    [
        ("qwen_omni", {"streamed"}),
        ("agent", {"streamed", "streamed each", "critical", "back", "node header"}),
        ("prefill_decode", {"streamed", "critical", "node join"}),
    ],
)
def test_legend_lists_the_marks_of_the_drawing(monkeypatch, name, marks):
    legend = ET.fromstring(to_svg(example(monkeypatch, name))).find(f"{SVG}g[@class='legend']")
    assert {part.get("class") for part in legend if part.tag != f"{SVG}text"} == marks


@pytest.fixture
def loop():
    """A loop that reads a constant, takes another input in the first iteration, and iterates frame by frame."""
    start = interface([["x"], ["r"]], {"y": STREAM}, inputs={"r": Field("text")})
    graph = Graph("g")
    x, c = graph.placeholder("x"), graph.placeholder("c")
    header = graph.role(type("Header", (Role,), {"run": start}), "header")
    body = graph.role(type("Body", (Role,), {"run": interface([["x", "c"]], {"y": STREAM})}), "body")
    made = header.run(x=x)
    result = body.run(x=made.y, c=c)
    body.run(x=x)
    header.run(r=result.y)
    graph.output(y=made.y)
    return GraphParser(graph).parse()


def test_text_marks_what_enters_a_loop(loop):
    text = to_text(loop)
    assert (
        "    on x + c: per activation of header.run\n"
        "      x <- header.run.y\n"
        "      x <- x (first iteration)\n"
        "      c <- c (constant, critical)\n"
    ) in text
    assert "    on r: each an iteration of loop 0\n      r <- body.run.y (per frame, loop 0)\n" in text


def test_drawings_mark_what_enters_a_loop(loop):
    lines = to_mermaid(loop).splitlines()
    assert '  in_x -->|"first iteration"| n1' in lines
    assert '  in_c -->|"constant"| n1' in lines
    assert '  n1 -.->|"each loop 0: y as r"| n0' in lines
    assert len(ET.fromstring(to_svg(loop)).findall(f"{SVG}path[@class='constant critical']")) == 1
    check_layout(to_svg(loop))
