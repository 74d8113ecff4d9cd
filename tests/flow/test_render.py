import xml.etree.ElementTree as ET

import pytest

from tests.flow.builders import Talker, Thinker, make_speech_plan
from vllm_omni.flow import Chunk, Graph, GraphParser
from vllm_omni.flow.render import to_mermaid, to_svg, to_text

SVG = "{http://www.w3.org/2000/svg}"


async def halve(chunks, call):
    async for chunk in chunks:
        yield Chunk(chunk.payload)


@pytest.fixture
def plan():
    return make_speech_plan(to_talker=halve)


def test_text_tells_every_field_and_what_feeds_it(plan):
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


def test_svg_boxes_do_not_overlap_and_edges_go_to_the_right(plan):
    root = ET.fromstring(to_svg(plan))
    places = [(float(box.get("x")), float(box.get("y"))) for box in root.findall(f"{SVG}rect")]
    assert len(set(places)) == len(places)
    for path in root.findall(f"{SVG}path"):
        start, end = path.get("d").split()[0], path.get("d").split()[-1]
        assert float(start.removeprefix("M").split(",")[0]) < float(end.split(",")[0])


def test_names_are_escaped():
    graph = Graph("<a & b>")
    reply = graph.role(Thinker, "x<y").generate(prompt=graph.placeholder("prompt"))
    graph.output(codes=graph.role(Talker, "talker").generate(rows=reply.rows).codes)
    assert "x<y.generate" in "".join(ET.fromstring(to_svg(GraphParser(graph).parse())).itertext())
