"""The reference, driven stage by stage, is the library's own ``generate`` with its defects corrected."""

from pathlib import Path

import pytest
import torch

from tests.reference.media import CASES, Case, make_audio, make_video, write_mp4, write_wav
from tests.reference.qwen2_5_omni import Reference
from vllm_omni.testing.qwen2_5_omni import build

QUICK = ("text", "images", "audio_short", "video_fps1", "video_audio_fps1", "mixed")  # one of each kind of input


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    return Reference(build(tmp_path_factory.mktemp("qwen2_5_omni")))


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, id=case.name, marks=[] if case.name in QUICK else pytest.mark.long) for case in CASES],
)
def test_equals_generate(reference: Reference, case: Case):
    answer = reference.answer(case, max_tokens=8, max_codes=30, repetition_penalty=1.05, seed=3)
    inputs = reference.process(case)
    torch.manual_seed(3)
    token_ids, waveform = reference.model.generate(
        **reference.generate_kwargs(inputs),
        thinker_max_new_tokens=8,
        talker_max_new_tokens=30,
        talker_repetition_penalty=1.05,
    )
    assert answer.reply.token_ids == token_ids[0, inputs["input_ids"].shape[1] :].tolist()
    assert torch.equal(answer.speech.waveform, waveform)


def test_lengths(reference: Reference):
    reply, speech = (answer := reference.answer(CASES[2], max_tokens=5, max_codes=7)).reply, answer.speech
    num_prompt_tokens, hidden_size = reply.prompt_ids.numel(), reference.config.talker_config.embedding_size
    assert reply.positions.shape == (3, num_prompt_tokens)
    assert reply.hidden_states.shape == (num_prompt_tokens + 4, hidden_size)
    assert reply.margins.shape == (5,)
    assert speech.prefill_inputs.shape == (num_prompt_tokens + 2, hidden_size)
    assert speech.prefill_positions.shape == (3, num_prompt_tokens + 2)
    assert speech.stream.shape == (5, hidden_size)
    assert speech.waveform.shape == (7 * 480,)


def test_the_talker_needs_its_attention_mask(reference: Reference):
    """The talker of an image prompt runs on 3-D positions, which the dropped mask would have made plain ones."""
    positions = reference.answer(CASES[2], max_tokens=3, max_codes=2).speech.prefill_positions
    assert not torch.equal(positions[0], positions[1])


def test_repetition_penalty_changes_codes(reference: Reference):
    plain, penalized = (reference.answer(CASES[0], repetition_penalty=penalty) for penalty in (1.0, 1.05))
    assert plain.reply.token_ids == penalized.reply.token_ids
    assert plain.speech.codes != penalized.speech.codes


def test_reply_of_one_token_has_no_speech(reference: Reference):
    answer = reference.answer(CASES[0], max_tokens=1)
    assert len(answer.reply.token_ids) == 1
    assert answer.speech is None


def test_written_media_can_be_read(tmp_path: Path):
    import av
    import soundfile

    audio, video = make_audio(1.0), make_video(6, width=64, height=48)
    samples, sampling_rate = soundfile.read(write_wav(tmp_path / "a.wav", audio), dtype="float32")
    assert sampling_rate == audio[1]
    assert abs(samples - audio[0]).max() < 1e-3
    with av.open(str(write_mp4(tmp_path / "v.mp4", video, fps=2, audio=audio))) as container:
        frames = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
        assert len(frames) == 6
        assert container.streams.video[0].average_rate == 2
        assert abs(frames[0].astype(int) - video[0]).mean() < 12
        container.seek(0)
        assert sum(frame.samples for frame in container.decode(audio=0)) >= samples.size
