import numpy as np
import pytest
import torch
from diffusers.pipelines.pipeline_utils import AudioPipelineOutput, ImagePipelineOutput
from diffusers.pipelines.wan.pipeline_output import WanPipelineOutput
from PIL import Image

from vllm_omni.diffusion.outputs import collect

PIXELS = np.arange(2 * 4 * 6 * 3, dtype=np.uint8).reshape(2, 4, 6, 3)  # [N, H, W, C]
FLOATS = PIXELS.astype(np.float32) / 255


@pytest.mark.parametrize(
    "images",
    [
        [Image.fromarray(picture) for picture in PIXELS],
        FLOATS,
        torch.from_numpy(FLOATS).permute(0, 3, 1, 2),
    ],
    ids=["PIL", "numpy", "torch"],
)
def test_images_of_every_kind_are_the_same_pixels(images):
    media = collect(None, ImagePipelineOutput(images=images), "media")
    assert media.keys() == {"images"}
    assert np.array_equal(media["images"].numpy(), PIXELS)
    floats = collect(None, ImagePipelineOutput(images=images), "float")["images"]
    assert floats.dtype == torch.float32 and np.allclose(floats.numpy(), FLOATS)


@pytest.mark.parametrize(
    "frames",
    [
        [[Image.fromarray(picture) for picture in PIXELS]],
        FLOATS[None],
        torch.from_numpy(FLOATS).permute(0, 3, 1, 2)[None],
        [torch.from_numpy(FLOATS).permute(0, 3, 1, 2)],
    ],
    ids=["PIL", "numpy", "torch", "list of torch"],
)
def test_frames_of_every_kind_are_the_same_pixels(frames):
    media = collect(None, WanPipelineOutput(frames=frames), "media")
    assert np.array_equal(media["frames"].numpy(), PIXELS[None])


def test_values_out_of_range_do_not_wrap():
    picture = torch.tensor([-0.5, 0.5, 1.5]).view(1, 3, 1, 1)
    assert collect(None, ImagePipelineOutput(images=picture), "media")["images"].flatten().tolist() == [0, 128, 255]


def test_sound_without_channels_gets_one(load_tiny):
    output = collect(load_tiny("stable-audio"), AudioPipelineOutput(audios=np.zeros((2, 5))), "media")
    assert output["audio"].shape == (2, 1, 5) and output["audio"].dtype == torch.float32
    assert output["sample_rate"] == 44100


def test_a_result_without_media_is_rejected(load_tiny):
    with pytest.raises(TypeError, match="QwenImagePipeline returned nothing"):
        collect(load_tiny("qwen-image"), ImagePipelineOutput(images=None), "media")


def test_pixels_that_are_not_finite_raise():
    images = torch.from_numpy(FLOATS).permute(0, 3, 1, 2).clone()
    images[1, 0, 0, 0] = float("nan")
    with pytest.raises(FloatingPointError, match="not finite"):
        collect(None, ImagePipelineOutput(images=images), "media")
