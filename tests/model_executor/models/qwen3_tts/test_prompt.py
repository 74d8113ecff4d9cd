"""Prompts of the talker: what stands where, and what is rejected."""

import pytest

from vllm_omni.errors import InvalidRequest
from vllm_omni.model_executor.models.qwen3_tts.prompt import NOTHING, ClonedVoice, PromptMaker
from vllm_omni.testing.qwen3_tts_config import VARIANTS, codec_id, make_config, token_id

SHAPE = VARIANTS["base"]
MAKER = PromptMaker(make_config(SHAPE))
ROLE, BODY = [1, 2, 3], [10, 11, 12]


def test_a_streamed_text_follows_its_first_token_with_the_frames():
    prompt = MAKER.make(ROLE, BODY, is_streamed=True)
    pad, bos, eos = (token_id(name) for name in ("<tts_pad>", "<tts_text_bos>", "<tts_text_eod>"))
    tags = [codec_id(SHAPE, name) for name in ("nothink", "think_bos", "think_eos")]
    assert prompt.text_ids == [*ROLE, pad, pad, pad, bos, 10]
    assert prompt.codec_ids == [NOTHING] * 3 + tags + [codec_id(SHAPE, "pad"), codec_id(SHAPE, "bos")]
    assert prompt.tail_ids == [11, 12, eos]


def test_a_streamed_prompt_does_not_grow_with_its_text():
    lengths = {len(MAKER.make(ROLE, [5] * n, is_streamed=True).text_ids) for n in (1, 7, 500)}
    assert len(lengths) == 1


def test_a_speaker_of_a_dialect_speaks_it_unless_another_language_is_asked_for():
    dialect = codec_id(SHAPE, "sichuan_dialect")
    for language, speaks in (("Auto", True), ("chinese", True), ("english", False)):
        prompt = MAKER.make(ROLE, BODY, speaker="Eric", language=language)
        assert (dialect in prompt.codec_ids) == speaks, language


def test_what_the_checkpoint_lacks_is_rejected_with_the_nearest_right_thing():
    for arguments, message in (
        ({"speaker": "vivien"}, "unknown speaker 'vivien'.*vivian"),
        ({"language": "englisch"}, "unknown language 'englisch'.*english"),
        ({"language": "sichuan_dialect"}, "unknown language 'sichuan_dialect'"),
    ):
        with pytest.raises(InvalidRequest, match=message):
            MAKER.make(ROLE, BODY, **arguments)
    with pytest.raises(InvalidRequest, match="no text to speak"):
        MAKER.make(ROLE, [])


def test_a_cloned_voice_stands_in_the_place_of_the_speaker():
    prompt = MAKER.make(ROLE, BODY, voice=ClonedVoice(), is_streamed=True)
    assert prompt.codec_ids[prompt.x_vector_at] == NOTHING
    assert prompt.text_ids[prompt.x_vector_at :] == [token_id("<tts_pad>"), token_id("<tts_text_bos>"), BODY[0]]
    assert prompt.frames_at is None


@pytest.mark.parametrize("num_frames", [2, 5, 9])
def test_a_recordings_frames_stand_beside_a_streamed_text_and_behind_a_whole_one(num_frames):
    voice, pad, eos = ClonedVoice([7, 8], num_frames), token_id("<tts_pad>"), token_id("<tts_text_eod>")
    text = [7, 8, *BODY, eos]
    streamed = MAKER.make(ROLE, BODY, voice=voice, is_streamed=True)
    start = streamed.frames_at - 1
    assert streamed.codec_ids[start:] == [codec_id(SHAPE, "bos"), *[NOTHING] * num_frames]
    beside = streamed.text_ids[start:]
    assert beside == (text + [pad] * 9)[: 1 + num_frames]
    assert streamed.tail_ids == text[1 + num_frames :]
    whole = MAKER.make(ROLE, BODY, voice=voice)
    assert whole.frames_at == len(whole.text_ids) - num_frames
    assert whole.text_ids[whole.frames_at - 1 - len(text) : whole.frames_at - 1] == text
    assert not whole.tail_ids
