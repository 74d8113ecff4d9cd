import msgspec
import pytest
import torch
from PIL import Image

from tests.diffusion.requests import OTHERS, REPRESENTATIVE, make_image
from vllm_omni.config.diffusion_params import DiffusionParams
from vllm_omni.diffusion.pipeline_arguments import frame_rate, needs_image, pipeline_arguments
from vllm_omni.diffusion.request import DiffusionRequest
from vllm_omni.errors import InvalidRequest


def test_a_request_is_the_same_after_msgpack():
    request = DiffusionRequest("a fox", [make_image(1)], DiffusionParams(height=64, extra_args={"a": [1, "b"]}))
    sent = msgspec.msgpack.decode(msgspec.msgpack.encode(request.to_args()))
    received = DiffusionRequest.from_args(sent)
    assert (received.prompt, received.params) == (request.prompt, request.params)
    assert received.images[0].tobytes() == request.images[0].tobytes()


def test_a_whole_number_becomes_a_float_where_one_is_wanted():
    args = DiffusionRequest("a fox", [], DiffusionParams(guidance_scale=4)).to_args()
    assert type(DiffusionRequest.from_args(args).params.guidance_scale) is float


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"params": {"height": "tall"}}, "height"),
        ({"params": {"heigth": 64}}, "heigth"),
    ],
)
def test_malformed_arguments_are_rejected(args, message):
    with pytest.raises(InvalidRequest, match=message):
        DiffusionRequest.from_args({"prompt": "a fox", **args})


def arguments(pipeline, images=(), **params):
    return pipeline_arguments(pipeline, DiffusionRequest("a fox", list(images), DiffusionParams(**params)))


def test_only_what_was_set_is_passed(load_tiny):
    given = arguments(load_tiny("wan2.2-t2v"), seed=3, guidance_scale=2.0, num_frames=5)
    generator = given.pop("generator")
    assert generator.initial_seed() == 3
    assert given == {"prompt": "a fox", "guidance_scale": 2.0, "num_frames": 5, "output_type": "pt"}


def test_a_request_without_guidance_logs_no_warning_of_diffusers(load_tiny, capfd):
    pipeline = load_tiny("qwen-image")
    plain = {"seed": 0, "height": 32, "width": 32, "num_inference_steps": 2}
    with torch.no_grad():
        pipeline(**arguments(pipeline, **plain))
        assert "true_cfg_scale" not in capfd.readouterr().err
    assert "true_cfg_scale" not in arguments(pipeline, negative_prompt="grey")


def test_each_output_is_a_call_with_its_own_seed(load_tiny):
    pipeline = load_tiny("qwen-image")
    request = DiffusionRequest("a fox", params=DiffusionParams(seed=3, num_outputs_per_prompt=2))
    given = [pipeline_arguments(pipeline, request, index) for index in range(2)]
    assert [arguments.pop("generator").initial_seed() for arguments in given] == [3, 4]
    assert given[0] == given[1] == {"prompt": "a fox", "true_cfg_scale": 1.0, "output_type": "pt"}


def test_without_a_seed_one_is_chosen_at_random(load_tiny):
    seeds = {arguments(load_tiny("qwen-image"))["generator"].initial_seed() for _ in range(3)}
    assert len(seeds) == 3


def test_choosing_a_seed_does_not_change_the_global_generator(load_tiny):
    state = torch.random.get_rng_state()
    arguments(load_tiny("qwen-image"))
    assert torch.equal(torch.random.get_rng_state(), state)


def test_fps_is_not_passed_to_a_pipeline_without_that_argument(load_tiny):
    assert arguments(load_tiny("wan2.2-t2v"), seed=0, fps=8).keys() == {"prompt", "generator", "output_type"}


PICTURES = [Image.new("RGB", (8, 8)), Image.new("RGB", (8, 8), "red"), Image.new("RGB", (8, 8), "blue")]


def test_a_video_has_the_frame_rate_of_the_request_or_of_its_pipeline(load_tiny):
    rates = [
        frame_rate(load_tiny(name), DiffusionParams(fps=fps))
        for name, fps in (("wan2.2-t2v", None), ("wan2.2-t2v", 8), ("ltx", None), ("ltx", 8))
    ]
    assert rates == [None, 8, 25, 8]


def test_one_image_is_not_passed_as_a_list(load_tiny):
    assert arguments(load_tiny("qwen-image-edit"), PICTURES[:1])["image"] is PICTURES[0]


def test_a_second_image_is_the_last_of_a_video(load_tiny):
    given = arguments(load_tiny("wan2.2-i2v"), PICTURES[:2])
    assert given["image"] is PICTURES[0] and given["last_image"] is PICTURES[1]


def test_several_reference_images_are_a_list(load_tiny):
    assert arguments(load_tiny("qwen-image-edit-plus"), PICTURES)["image"] == PICTURES


@pytest.mark.parametrize(
    ("name", "count", "message"),
    [
        ("qwen-image", 1, "takes no input image, got 1"),
        ("qwen-image-edit", 0, "needs an input image, got none"),
        ("wan2.2-i2v", 0, "needs an input image, got none"),
        ("qwen-image-edit", 2, "takes one input image, got 2"),
        ("wan2.2-i2v", 3, "takes one input image, got 3"),
    ],
)
def test_a_wrong_number_of_images_is_rejected(load_tiny, name, count, message):
    with pytest.raises(InvalidRequest, match=message):
        arguments(load_tiny(name), PICTURES[:count])


@pytest.mark.parametrize(
    ("name", "params", "message"),
    [
        ("stable-audio", {"height": 64}, "StableAudioPipeline takes no height"),
        ("flux", {"guidance_scale_2": 1.0}, "FluxPipeline takes no guidance_scale_2"),
        ("qwen-image", {"extra_args": {"image_size": 1}}, "takes no extra argument 'image_size'"),
        ("qwen-image", {"num_inference_steps": 1}, "num_inference_steps = 1: .* at least 2"),  # 0 / 0
        ("qwen-image", {"height": 8}, "height = 8: must be a multiple of 16 for QwenImagePipeline: 16"),
        ("flux", {"height": 1080}, "height = 1080: must be a multiple of 16 for FluxPipeline: 1072 or 1088"),
        ("wan2.2-t2v", {"width": 15}, "width = 15: must be a multiple of 16 for WanPipeline: 16"),
    ],
)
def test_arguments_that_a_pipeline_does_not_accept_are_rejected(load_tiny, name, params, message):
    with pytest.raises(InvalidRequest, match=message):
        arguments(load_tiny(name), **params)


@pytest.mark.parametrize("names", [REPRESENTATIVE, pytest.param(OTHERS, marks=pytest.mark.long)])
def test_usual_sizes_are_on_the_grid_of_every_pipeline(names, load_tiny):
    for name in names:
        images = PICTURES[:1] if needs_image(load_tiny(name)) else []
        for width, height in ((512, 512), (1024, 1024), (1536, 1024), (1024, 1536), (1280, 768), (832, 480)):
            if name != "stable-audio":
                assert arguments(load_tiny(name), images, width=width, height=height)["width"] == width, name
