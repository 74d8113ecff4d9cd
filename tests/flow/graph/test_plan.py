from dataclasses import FrozenInstanceError

import pytest

from tests.flow.builders import make_speech_plan
from vllm_omni.flow import ENTRY


def test_output_needs_its_ancestors_only():
    needed_by = make_speech_plan().needed_by
    assert needed_by["text"].nodes == {"thinker.generate"}
    assert needed_by["codec_ids"].nodes == {"thinker.generate", "talker.generate"}
    assert needed_by["audio"].nodes == {"thinker.generate", "talker.generate", "token2wav.decode"}


def test_output_needs_the_edges_on_its_way():
    assert {str(edge) for edge in make_speech_plan().needed_by["codec_ids"].edges} == {
        "entry.prompt -> thinker.generate.prompt",
        "thinker.generate.rows -> talker.generate.rows",
        "talker.generate.codes -> entry.codec_ids",
    }


def test_text_only_route_has_no_way_to_the_talker():
    route = make_speech_plan().route({"text"})
    assert list(route.nodes) == ["thinker.generate"]
    assert route.outlets["thinker.generate"].fields == {"text"}


def test_audio_only_route_sends_no_text():
    assert make_speech_plan().route({"audio"}).outlets["thinker.generate"].fields == {"rows"}


def test_field_with_two_readers_has_two_edges():
    edges = make_speech_plan().route({"audio", "codec_ids"}).outlets["talker.generate"].whole["codes"]
    assert {edge.target for edge in edges} == {"token2wav.decode", ENTRY}


def test_route_lists_the_placeholders_it_needs():
    assert make_speech_plan().route({"text"}).placeholders == {"prompt"}


def test_roles_are_those_that_need_a_node():
    assert make_speech_plan().roles == {"thinker", "talker", "token2wav"}


def test_plan_is_frozen():
    plan = make_speech_plan()
    with pytest.raises(FrozenInstanceError):
        plan.name = "other"
    with pytest.raises(TypeError):
        plan.nodes["new"] = None
