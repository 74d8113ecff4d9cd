from pathlib import Path

import pytest
import torch
from vllm.outputs import RequestOutput

from tests.test_audio_format import decode
from vllm_omni.audio_format import AUDIO_SUFFIXES
from vllm_omni.errors import OmniError
from vllm_omni.outputs import OmniRequestOutput


def make_output(audio: torch.Tensor | None = None) -> OmniRequestOutput:
    output = OmniRequestOutput.of(RequestOutput("a", "hi", [1], None, outputs=[], finished=True))
    if audio is not None:
        output.multimodal_output = {"audio": audio, "sample_rate": 24000}
    return output


def test_deltas_add_up_without_loss() -> None:
    output = make_output(torch.zeros(2))
    later = make_output(torch.ones(3))
    later.multimodal_output["codec_ids"] = [4, 5]
    output.add(later, aggregate=True)
    output.add(later, aggregate=True)
    assert output.multimodal_output["audio"].tolist() == [0, 0, 1, 1, 1, 1, 1, 1]
    assert output.multimodal_output["codec_ids"] == [4, 5, 4, 5]
    assert later.multimodal_output["codec_ids"] == [4, 5]


@pytest.mark.parametrize("suffix", sorted(AUDIO_SUFFIXES))
def test_saved_audio_is_playable(tmp_path: Path, suffix: str) -> None:
    tone = torch.sin(torch.arange(24000) * 0.1) * 0.5
    path = make_output(tone).save_audio(tmp_path / f"tone{suffix}")
    samples = decode(AUDIO_SUFFIXES[suffix], path.read_bytes())
    assert 24000 <= len(samples) <= 24000 + 2048  # a lossy format ends in whole frames
    assert abs(samples).max() == pytest.approx(0.5, abs=0.05)


def test_an_unknown_suffix_is_refused_with_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"\.docx.*\.wav"):
        make_output(torch.zeros(10)).save_audio(tmp_path / "speech.docx")
    assert not list(tmp_path.iterdir())


def test_saving_an_answer_without_audio_says_how_to_get_some(tmp_path: Path) -> None:
    with pytest.raises(OmniError, match="modalities"):
        make_output().save_audio(tmp_path / "speech.wav")


def test_the_repr_shows_shapes_rather_than_samples() -> None:
    assert "'audio': (5,)" in repr(make_output(torch.zeros(5)))
