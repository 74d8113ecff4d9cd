"""Outputs that the user receives, made from the frames of a call."""

from collections.abc import AsyncIterator, Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.logprobs import Logprob
from vllm.outputs import CompletionOutput

from vllm_omni.engine.answer import Answer
from vllm_omni.engine.latency_metrics import LatencyMetrics, RequestLatency
from vllm_omni.engine.request_record import RequestRecord
from vllm_omni.errors import StageFailed
from vllm_omni.flow import CallInfo, Chunk, Field, Graph, GraphParser, OutputFrame, Role, StaticPlan, interface
from vllm_omni.messages.stage_output import StageOutput
from vllm_omni.model_executor.pipeline import StageSpec

OUTPUTS = {"text": "reply", "audio": "speech", "codec_ids": "codes", "critique": "critique", "picture": "image"}
STREAMED = Field("any", streamed=True)


class Writer(Role):
    write = interface([["prompt"], ["draft"]], {"text": STREAMED})


class Maker(Role):
    make = interface([["source"]], {"made": STREAMED})


async def convert(chunks: AsyncIterator[Chunk], call: CallInfo) -> AsyncIterator[Chunk]:
    async for chunk in chunks:
        yield chunk


def make_plan(*, is_loop: bool = False) -> StaticPlan:
    graph = Graph("all")
    writer = graph.role(Writer, "thinker")
    reply = writer.write(prompt=graph.placeholder("prompt"))
    if is_loop:
        writer.write(draft=reply.text.via(convert))
    makers = {name: graph.role(Maker, name) for name in ("talker", "vocoder", "critic", "painter")}
    made = {name: maker.make(source=reply.text.via(convert)).made for name, maker in makers.items()}
    outputs = {"speech": "vocoder", "codes": "talker", "critique": "critic", "image": "painter"}
    graph.output(reply=reply.text, **{output: made[stage] for output, stage in outputs.items()})
    return GraphParser(graph).parse()


def make_pipeline() -> Any:
    types = {"thinker": "latents", "talker": "text", "vocoder": "audio", "critic": "text", "painter": "image"}
    return SimpleNamespace(
        speaks_first=False,
        stages=[StageSpec(name, "", output_type) for name, output_type in types.items()],
        sample_rate=24_000,
        modalities={name: output for name, output in OUTPUTS.items() if name != "codec_ids"},
        extra_outputs={"codec_ids": "codes"},
        extra_output=lambda name, output: [name, output.outputs[0].token_ids],
    )


def make_answer(outputs: Mapping[str, str] = OUTPUTS, *, is_loop: bool = False) -> Answer:
    record = RequestRecord(stage_durations={"thinker": 2.0})
    latency = RequestLatency(record, "thinker", {}, LatencyMetrics())
    return Answer(make_pipeline(), make_plan(is_loop=is_loop), "user-1", record, outputs, latency)


@pytest.fixture
def answer() -> Answer:
    return make_answer()


def make_payload(text: str = "a", finish_reason: str | None = None, index: int = 0, **values: Any) -> StageOutput:
    completion = CompletionOutput(index, text, [7], None, None, finish_reason=finish_reason)
    return StageOutput("stage-1", [completion], [1], multimodal_output=values)


def test_text_is_the_stages_output_under_the_users_id(answer: Answer) -> None:
    payload = make_payload()
    output = answer.output_of(OutputFrame("reply", payload, 0, last=False))
    assert (output.request_id, output.finished, output.outputs[0].token_ids) == ("user-1", False, [7])
    output.outputs[0].token_ids += [8]
    assert payload.outputs[0].token_ids == [7], "the next stage reads the payload"


def test_other_modalities_have_values_and_no_text(answer: Answer) -> None:
    audio = answer.output_of(OutputFrame("speech", make_payload(audio=torch.ones(3)), 0, last=False))
    assert audio.outputs == [] and audio.multimodal_output["sample_rate"] == 24_000
    assert audio.multimodal_output["audio"].tolist() == [1, 1, 1]
    codes = answer.output_of(OutputFrame("codes", make_payload(), 0, last=False))
    assert codes.multimodal_output == {"codec_ids": ["codec_ids", [7]]}


def test_a_branch_without_output_gives_an_empty_value(answer: Answer) -> None:
    audio = answer.output_of(OutputFrame("speech", None, 0, last=True)).multimodal_output
    assert audio["audio"].numel() == 0 and audio["sample_rate"] == 24_000
    assert answer.output_of(OutputFrame("codes", None, 0, last=True)).multimodal_output == {"codec_ids": []}


def test_a_branch_that_was_not_taken_has_the_keys_of_one_that_was(answer: Answer) -> None:
    untaken = answer.output_of(OutputFrame("image", None, 0, last=True)).multimodal_output
    taken = make_answer().output_of(OutputFrame("image", make_payload(images=torch.ones(1, 2, 2, 3)), 0, last=False))
    assert untaken.keys() == taken.multimodal_output.keys() == {"images"}
    assert untaken["images"].shape == (0, 0, 0, 3)


def test_the_end_of_a_branch_that_was_taken_adds_nothing(answer: Answer) -> None:
    taken = answer.output_of(OutputFrame("image", make_payload(images=torch.ones(1, 2, 2, 3)), 0, last=False))
    taken.add(answer.output_of(OutputFrame("image", None, 1, last=True)), aggregate=True)
    assert taken.multimodal_output["images"].shape == (1, 2, 2, 3)


def test_the_text_of_another_stage_has_its_own_name(answer: Answer) -> None:
    critique = answer.output_of(OutputFrame("critique", make_payload("so-"), 0, last=False))
    critique.add(answer.output_of(OutputFrame("critique", make_payload("so"), 1, last=True)), aggregate=True)
    assert critique.multimodal_output == {"critique": "so-so"} and critique.outputs == []
    assert make_answer().output_of(OutputFrame("critique", None, 0, last=True)).multimodal_output == {"critique": ""}


def test_a_text_made_by_several_requests_ends_once(answer: Answer) -> None:
    answer = make_answer({"text": "reply"}, is_loop=True)
    outputs = [
        answer.output_of(OutputFrame("reply", make_payload("first", "length"), 0, last=False)),
        answer.output_of(OutputFrame("reply", make_payload("second", "stop"), 1, last=False)),
        answer.output_of(OutputFrame("reply", None, 2, last=True)),
    ]
    ends = [(one.text, one.finish_reason) for output in outputs for one in output.outputs]
    assert ends == [("first", None), ("second", None), ("", "stop")]
    assert [output.prompt_token_ids for output in outputs] == [[1]] * 3


def test_the_last_piece_of_a_text_has_the_finish_reasons_of_all_choices() -> None:
    answer = make_answer({"text": "reply"}, is_loop=True)
    answer.output_of(OutputFrame("reply", make_payload("a", "length", index=1), 0, last=False))
    last = answer.output_of(OutputFrame("reply", make_payload("b", "stop", index=0), 1, last=True))
    assert [(one.index, one.text, one.finish_reason) for one in last.outputs] == [(0, "b", "stop"), (1, "", "length")]


def test_choices_of_a_single_request_end_as_they_do() -> None:
    answer = make_answer({"text": "reply"})
    output = answer.output_of(OutputFrame("reply", make_payload("a", "length", index=1), 0, last=False))
    assert output.outputs[0].finish_reason == "length"


def test_the_last_output_of_all_modalities_has_the_times(answer: Answer) -> None:
    outputs = [answer.output_of(OutputFrame(field, None, 0, last=True)) for field in OUTPUTS.values()]
    assert [output.finished for output in outputs] == [False] * (len(OUTPUTS) - 1) + [True]
    assert outputs[0].stage_durations == {"thinker": 2.0}
    assert set(outputs[-1].stage_durations) == {"thinker", "total"}


def test_a_text_without_a_prompt_has_the_fields_of_one_with_a_prompt() -> None:
    answer = make_answer({"text": "reply"})
    output = answer.output_of(OutputFrame("reply", "Hello.", 0, last=True))  # as a function emits it
    assert (output.outputs[0].text, output.outputs[0].finish_reason) == ("Hello.", "stop")
    assert output.prompt_token_ids == []


def test_merging_the_users_pieces_leaves_the_stages_log_probabilities() -> None:
    answer = make_answer({"text": "reply"})
    payload = make_payload()
    payload.outputs[0].logprobs = [{7: Logprob(-1.0)}]
    output = answer.output_of(OutputFrame("reply", payload, 0, last=False))
    output.add(answer.output_of(OutputFrame("reply", payload, 1, last=False)), aggregate=True)
    assert len(output.outputs[0].logprobs) == 2 and len(payload.outputs[0].logprobs) == 1


def test_a_function_that_emits_what_its_output_is_not_is_named(answer: Answer) -> None:
    said = answer.output_of(OutputFrame("critique", "so-so", 0, last=False))
    assert said.multimodal_output == {"critique": "so-so"}
    for field, payload in (("image", "a cat"), ("reply", {"images": ()}), ("critique", 7)):
        with pytest.raises(StageFailed, match=rf"emitted a {type(payload).__name__} as '"):
            answer.output_of(OutputFrame(field, payload, 0, last=False))


# -- several outputs of one stage --------------------------------------------------------------------------------------


def make_answer_of_one_stage(output_type: str, **fields: str) -> Answer:
    """One stage with an output of each field, declared as of this kind; each answers the modality of its name."""

    class Artist(Role):
        make = interface([["prompt"]], {name: Field(kind, streamed=True) for name, kind in fields.items()})

    graph = Graph("artist")
    made = graph.role(Artist, "artist").make(prompt=graph.placeholder("prompt"))
    graph.output(**{name: getattr(made, name) for name in fields})
    outputs = {name: name for name in fields}
    spec = StageSpec("artist", "", output_type)
    pipeline: Any = SimpleNamespace(
        stages=[spec], sample_rate=24_000, modalities=outputs, extra_outputs={}, speaks_first=False
    )
    record = RequestRecord()
    latency = RequestLatency(record, "artist", {}, LatencyMetrics())
    return Answer(pipeline, GraphParser(graph).parse(), "user-1", record, outputs, latency)


def test_a_stage_of_texts_and_images_answers_both_under_their_names() -> None:
    answer = make_answer_of_one_stage("text+image", caption="text", picture="image")
    payload = make_payload("a cat", images=torch.ones(1, 2, 2, 3))
    merged = answer.output_of(OutputFrame("caption", payload, 0, last=True))
    merged.add(answer.output_of(OutputFrame("picture", payload, 0, last=True)), aggregate=True)
    assert merged.multimodal_output["caption"] == "a cat"
    assert merged.multimodal_output["images"].shape == (1, 2, 2, 3)
    untaken = answer.output_of(OutputFrame("caption", None, 0, last=True)).multimodal_output
    assert untaken == {"caption": ""}


def test_a_sound_beside_a_video_of_one_stage_is_in_the_answer_once() -> None:
    payload = make_payload(frames=torch.ones(1, 4, 2, 2, 3), audio=torch.ones(3), fps=8)
    answer = make_answer_of_one_stage("video", video="video", sound="audio")
    merged = answer.output_of(OutputFrame("video", payload, 0, last=True))
    merged.add(answer.output_of(OutputFrame("sound", payload, 0, last=True)), aggregate=True)
    assert merged.multimodal_output["frames"].shape == (1, 4, 2, 2, 3)
    assert merged.multimodal_output["audio"].tolist() == [1, 1, 1]
    alone = make_answer_of_one_stage("video", video="video").output_of(OutputFrame("video", payload, 0, last=True))
    assert {"frames", "audio", "fps"} <= alone.multimodal_output.keys(), "a video alone keeps its sound"


# -- outputs of one kind by several stages -----------------------------------------------------------------------------


def make_answer_of_stages(*outputs: str, **kinds: str) -> Answer:
    """A stage for each modality, of these kinds, which declares nothing; the request asks for ``outputs``."""
    graph = Graph("studio")
    prompt = graph.placeholder("prompt")
    graph.output(**{name: graph.role(Maker, name).make(source=prompt).made for name in kinds})
    pipeline: Any = SimpleNamespace(
        stages=[StageSpec(name, "", kind) for name, kind in kinds.items()],
        sample_rate=24_000,
        modalities={name: name for name in kinds},
        extra_outputs={},
        speaks_first=False,
    )
    record = RequestRecord()
    latency = RequestLatency(record, "artist", {}, LatencyMetrics())
    wanted = {name: name for name in outputs or kinds}
    return Answer(pipeline, GraphParser(graph).parse(), "user-1", record, wanted, latency)


def test_two_sounds_and_two_pictures_of_a_request_stay_apart() -> None:
    kinds = {"music": "audio", "audio": "audio", "sketch": "image", "drawing": "image"}
    answer, merged = make_answer_of_stages(**kinds), None
    values = {"music": {"audio": torch.ones(2), "sample_rate": 16_000}, "audio": {"audio": torch.zeros(3)}}
    for name in kinds:
        made = values.get(name, {"images": torch.full((1, 2, 2, 3), float(len(name)))})
        output = answer.output_of(OutputFrame(name, make_payload(**made), 0, last=True))
        if merged is None:
            merged = output
        else:
            merged.add(output, aggregate=True)
    assert merged is not None
    media = merged.multimodal_output
    assert media["audio"].tolist() == [0, 0, 0] and media["sample_rate"] == 24_000
    assert media["music.audio"].tolist() == [1, 1] and media["music.sample_rate"] == 16_000
    assert media["images"].flatten()[0] == len("sketch") and media["drawing.images"].flatten()[0] == len("drawing")


def test_a_picture_that_is_asked_for_alone_has_the_plain_key() -> None:
    answer = make_answer_of_stages("drawing", sketch="image", drawing="image")
    output = answer.output_of(OutputFrame("drawing", make_payload(images=torch.ones(1, 2, 2, 3)), 0, last=True))
    assert set(output.multimodal_output) == {"images"}


@pytest.mark.parametrize("order", [("audio", "video"), ("video", "audio")])
def test_the_sound_of_a_video_is_not_the_speech_beside_it(order: tuple[str, str]) -> None:
    answer = make_answer_of_stages(**{name: name for name in order})
    filmed = make_payload(frames=torch.ones(1, 2, 2, 2, 3), fps=8, audio=torch.ones(1, 1, 5), sample_rate=16_000)
    merged = answer.output_of(OutputFrame("video", filmed, 0, last=True))
    merged.add(answer.output_of(OutputFrame("audio", make_payload(audio=torch.zeros(3)), 0, last=True)), aggregate=True)
    media = merged.multimodal_output
    assert (media["audio"].shape, media["video.audio"].shape, media["video.sample_rate"]) == ((3,), (1, 1, 5), 16_000)
    assert {"frames", "fps"} <= media.keys()


def test_an_extra_output_that_fails_is_the_pipelines_fault() -> None:
    answer = make_answer({"codec_ids": "codes"})
    answer._pipeline.extra_output = lambda name, output: [][0]
    with pytest.raises(StageFailed, match="'talker': the pipeline's extra_output of 'codec_ids' failed: IndexError"):
        answer.output_of(OutputFrame("codes", make_payload(), 0, last=True))
