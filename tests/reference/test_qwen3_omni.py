"""The reference, driven stage by stage, is the library's own ``generate`` with its defects corrected."""

import pytest
import torch

from tests.reference.media import CASES, make_image
from tests.reference.qwen3_omni import Reference
from vllm_omni.testing.qwen3_omni import VARIANTS, build

OTHERS = sorted(VARIANTS.keys() - {"base", "thinker"})
# The talker has no ids for its prompt, so its penalty counts only what it generates, as the library says.
pytestmark = pytest.mark.filterwarnings("ignore:Passing `repetition_penalty` with `inputs_embeds`:UserWarning")
NAMES = (  # one of each kind of input
    "text",
    "text2",
    "images",
    "audio_short",
    "video_fps1",
    "video_audio_fps1",
    "mixed",
)


@pytest.fixture(scope="module", params=["base", *(pytest.param(one, marks=pytest.mark.long) for one in OTHERS)])
def reference(request, tmp_path_factory) -> Reference:
    return Reference(build(tmp_path_factory.mktemp("qwen3_omni"), variant=request.param))


def test_equals_generate(reference: Reference):
    for case in (one for one in CASES if one.name in NAMES):
        inputs = reference.process(case)
        answer = reference.answer(case, max_tokens=8, max_codes=30, speaker="chelsie")
        assert answer.speech is not None
        if not len(answer.speech.codes):
            with pytest.raises(RuntimeError, match="non-empty"):
                generate(reference, inputs)
            continue
        ids, waveform = generate(reference, inputs)
        assert answer.reply.token_ids == ids[0, inputs["input_ids"].shape[1] :].tolist(), case.name
        assert answer.speech.waveform.shape == waveform.flatten().shape, case.name
        assert (answer.speech.waveform - waveform.flatten()).abs().max() < 1e-6, case.name


def generate(reference: Reference, inputs: dict) -> tuple[torch.Tensor, torch.Tensor]:
    return reference.model.generate(
        **inputs,
        speaker="Chelsie",
        thinker_max_new_tokens=8,
        thinker_do_sample=False,
        thinker_eos_token_id=reference.config.im_end_token_id,
        talker_max_new_tokens=30,
        talker_do_sample=False,
    )


def test_answers_vary_and_speech_can_end(reference: Reference):
    answers = [reference.answer(case, max_tokens=12, max_codes=60) for case in CASES[:4]]
    assert all(len(set(answer.reply.token_ids)) > 6 for answer in answers)
    # Rounding, which differs between processors, cannot turn a token of such a margin.
    assert all(answer.reply.margins.min() > 1e-2 for answer in answers)
    assert any(len(set(answer.speech.codes[:, 0].tolist())) > 6 for answer in answers)
    waves = [answer.speech.waveform for answer in answers if len(answer.speech.codes)]
    assert waves and all(0.05 < wave.abs().max() < 1 for wave in waves)
    assert any(answer.speech.finished for answer in answers)


def test_a_reply_of_one_token_has_no_speech(reference: Reference):
    assert reference.answer(CASES[0], max_tokens=1).speech is None


def test_the_picture_changes_what_the_talker_reads(reference: Reference):
    case = next(one for one in CASES if one.name == "image")
    other = type(case)(case.name, case.prompt, images=(make_image(224, 112, seed=9),))
    inputs = [reference.process(one) for one in (case, other)]
    replies = [reference.think(one, 2) for one in inputs]
    rows = [reference.make_talker_inputs(reply, "ethan")[0] for reply in replies]
    assert rows[0].shape == rows[1].shape
    assert not torch.allclose(rows[0], rows[1], atol=1e-2)
