import io
from pathlib import Path
from typing import Any

import pytest
import soundfile
import torch
from PIL import Image
from vllm.outputs import CompletionOutput, RequestOutput, SamplingMask

from tests.cases import case
from tests.media.test_audio import decode
from tests.media.test_image import make_pixels
from tests.media.test_video import decode as decode_video
from tests.media.test_video import decode_sound, make_frames, make_sound
from vllm_omni.errors import OmniError
from vllm_omni.media.audio import AUDIO_SUFFIXES
from vllm_omni.messages.outputs import OmniRequestOutput, Progress, copy_completion, join_multimodal, merge_multimodal


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


def test_of_errors_the_first_counts() -> None:
    output = make_output()
    for error in ("the first", "what followed from it"):
        merge_multimodal(output.multimodal_output, {"error": error, "invalid": False})
    assert output.multimodal_output == {"error": "the first", "invalid": False}


def test_joining_pieces_is_merging_them_one_by_one() -> None:
    pieces = [
        {"audio": torch.tensor([float(number)]), "codes": [number], "notes": str(number), "sample_rate": number}
        for number in range(3)
    ]
    merged: dict[str, Any] = {}
    for piece in pieces:
        merge_multimodal(merged, piece)
    joined = join_multimodal(pieces)
    assert joined.pop("audio").tolist() == merged.pop("audio").tolist() == [0, 1, 2]
    assert joined == merged == {"codes": [0, 1, 2], "notes": "012", "sample_rate": 2}
    assert pieces[0]["codes"] == [0]


def test_merging_into_a_copy_leaves_the_original() -> None:
    original = CompletionOutput(0, "a", [1], None, None, sampling_mask=SamplingMask([[1, 2]]))
    whole = RequestOutput("a", None, [1], None, [copy_completion(original)], finished=False)
    whole.add(RequestOutput("a", None, [1], None, [original], finished=True), aggregate=True)
    assert (whole.outputs[0].text, whole.outputs[0].token_ids) == ("aa", [1, 1])
    assert whole.outputs[0].sampling_mask == SamplingMask([[1, 2], [1, 2]])
    assert (original.text, original.token_ids, original.sampling_mask) == ("a", [1], SamplingMask([[1, 2]]))


def test_saved_audio_is_playable(tmp_path: Path) -> None:
    for suffix in sorted(AUDIO_SUFFIXES):
        with case(suffix):
            tone = torch.sin(torch.arange(24000) * 0.1) * 0.5
            path = make_output(tone).save_audio(tmp_path / f"tone{suffix}")
            samples = decode(AUDIO_SUFFIXES[suffix], path.read_bytes())
            assert 24000 <= len(samples) <= 24000 + 2048  # a lossy format ends in whole frames
            assert abs(samples).max() == pytest.approx(0.5, abs=0.05)


def test_an_unknown_suffix_is_rejected_with_the_valid_ones(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"\.docx.*\.wav"):
        make_output(torch.zeros(10)).save_audio(tmp_path / "speech.docx")
    assert not list(tmp_path.iterdir())


def test_saving_an_answer_without_audio_says_how_to_get_some(tmp_path: Path) -> None:
    with pytest.raises(OmniError, match="modalities"):
        make_output().save_audio(tmp_path / "speech.wav")


def test_the_repr_shows_shapes_rather_than_samples() -> None:
    assert "'audio': (5,)" in repr(make_output(torch.zeros(5)))


# -- what diffusion pipelines answer -----------------------------------------------------------------------------------


def make_media(**multimodal_output: Any) -> OmniRequestOutput:
    output = make_output()
    output.multimodal_output = multimodal_output
    return output


def read_image(path: Path) -> torch.Tensor:
    with Image.open(io.BytesIO(path.read_bytes())) as image:
        return torch.tensor(list(image.tobytes()), dtype=torch.uint8).view(image.height, image.width, 3)


def test_images_are_those_of_the_tensor() -> None:
    pixels = torch.stack([make_pixels(), 255 - make_pixels()])
    images = make_media(images=pixels).images
    assert [image.size for image in images] == [(40, 24), (40, 24)]
    assert [list(image.tobytes()) for image in images] == [one.flatten().tolist() for one in pixels]


def test_float_images_are_given_as_pixels() -> None:
    (image,) = make_media(images=make_pixels()[None].float() / 255).images
    assert list(image.tobytes()) == make_pixels().flatten().tolist()


def test_an_answer_of_text_has_no_other_media() -> None:
    output = make_output()
    assert (output.images, output.video, output.fps, output.latents, output.progress, output.preview) == (
        [],
        None,
        None,
        None,
        None,
        None,
    )


def test_one_video_is_its_frames_and_several_are_a_list() -> None:
    frames = make_frames(3)
    video = make_media(frames=frames[None], fps=12).video
    assert isinstance(video, torch.Tensor)
    assert torch.equal(video, frames)
    videos = make_media(frames=torch.stack([frames, frames])).video
    assert isinstance(videos, list)
    assert [tuple(one.shape) for one in videos] == [(3, 48, 64, 3)] * 2


def test_a_video_has_its_rate_or_the_usual_one() -> None:
    assert make_media(frames=make_frames()[None], fps=12).fps == 12
    assert make_media(frames=make_frames()[None]).fps == 16


def test_progress_and_preview_are_the_latest() -> None:
    output = make_media(step=1, num_steps=4, preview=make_pixels())
    output.add(make_media(step=2, num_steps=4, preview=255 - make_pixels()), aggregate=True)
    output.add(make_media(images=make_pixels()[None]), aggregate=True)
    assert output.progress == Progress(2, 4)
    assert output.preview is not None
    assert list(output.preview.tobytes()) == (255 - make_pixels()).flatten().tolist()
    assert len(output.images) == 1


def test_one_image_is_saved_under_the_given_name(tmp_path: Path) -> None:
    pixels = make_pixels()
    assert make_media(images=pixels[None]).save(tmp_path / "cat.png") == [tmp_path / "cat.png"]
    assert torch.equal(read_image(tmp_path / "cat.png"), pixels)


def test_several_images_get_numbers(tmp_path: Path) -> None:
    for name in ["cat.png", "cat.JPG", "cat.webp"]:
        with case(name):
            pixels = torch.stack([make_pixels(), 255 - make_pixels()])
            paths = make_media(images=pixels).save(tmp_path / name)
            stem, _, suffix = name.partition(".")
            assert [path.name for path in paths] == [f"{stem}-0.{suffix}", f"{stem}-1.{suffix}"]
            for path, one in zip(paths, pixels, strict=True):
                assert (read_image(path).int() - one.int()).abs().float().mean() < 2.5
            assert not (tmp_path / name).exists()


def test_a_video_is_saved_with_its_rate(tmp_path: Path) -> None:
    for suffix in [".mp4", ".webm", ".gif"]:
        with case(suffix):
            (path,) = make_media(frames=make_frames()[None], fps=10).save(tmp_path / f"cat{suffix}")
            frames, times = decode_video(path.read_bytes())
            assert frames.shape == (7, 48, 64, 3)
            assert times[-1] == pytest.approx(0.6, abs=0.01)


def test_several_videos_get_numbers_and_each_its_sound(tmp_path: Path) -> None:
    frames = torch.stack([make_frames(8), make_frames(8)])
    sounds = torch.stack([make_sound(1), torch.zeros(1, 16000)])
    paths = make_media(frames=frames, fps=8, audio=sounds, sample_rate=16000).save(tmp_path / "cat.mp4")
    assert [path.name for path in paths] == ["cat-0.mp4", "cat-1.mp4"]
    loudness = [abs(decode_sound(path.read_bytes())[0]).max() for path in paths]
    assert loudness[0] > 0.4
    assert loudness[1] < 0.01


def test_sounds_of_two_channels_are_saved_with_both(tmp_path: Path) -> None:
    sounds = torch.stack([make_sound(2), -make_sound(2)])
    paths = make_media(audio=sounds, sample_rate=16000).save(tmp_path / "sea.wav")
    assert [path.name for path in paths] == ["sea-0.wav", "sea-1.wav"]
    for path, sound in zip(paths, sounds, strict=True):
        samples, sample_rate = soundfile.read(path, dtype="float32")
        assert sample_rate == 16000
        torch.testing.assert_close(torch.from_numpy(samples.T), sound, atol=1e-4, rtol=0)


def test_a_missing_modality_is_reported_with_those_of_the_output(tmp_path: Path) -> None:
    for media, name, said in [
        ({"images": make_pixels()[None]}, "a.mp4", "no video; it has an image: .png, .jpg, .jpeg, .webp"),
        ({"frames": make_frames()[None]}, "a.png", "no image; it has a video: .mp4, .webm, .gif"),
        ({"images": make_pixels()[None]}, "a.wav", "no sound; it has an image"),
        ({"latents": torch.zeros(1, 4)}, "a.png", "no image; it has latents, which are no file"),
        ({}, "a.png", "no image; it has text alone"),
    ]:
        with case(media, name):
            with pytest.raises(OmniError, match=said):
                make_media(**media).save(tmp_path / name)
            assert list(tmp_path.iterdir()) == []


def test_a_wrong_suffix_is_rejected_with_those_of_the_output(tmp_path: Path) -> None:
    for name, said in [
        ("cat.pgn", r"unknown suffix '.pgn': did you mean '.png'\? valid: .png, .jpg, .jpeg, .webp$"),
        ("cat", "it has no suffix: valid: .png"),
    ]:
        with case(name), pytest.raises(ValueError, match=said):
            make_media(images=make_pixels()[None]).save(tmp_path / name)
