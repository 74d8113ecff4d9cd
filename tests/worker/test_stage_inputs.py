"""Tensors of earlier stages as inputs of a diffusers pipeline."""

from collections.abc import Iterator

import pytest
import torch
from PIL import Image

from vllm_omni.diffusion.pipeline_arguments import pipeline_arguments
from vllm_omni.diffusion.request import DiffusionRequest
from vllm_omni.errors import RelayBroken
from vllm_omni.messages.payload import encode
from vllm_omni.relay.hub import RelayHub, RelayOptions
from vllm_omni.worker.stage_inputs import pull_inputs


@pytest.fixture
def hub() -> Iterator[RelayHub]:
    hub = RelayHub(RelayOptions("shm", 1 << 20, inline_bytes=0))
    yield hub
    hub.close()


def request(hub: RelayHub, trees: list[dict[str, torch.Tensor]], **inputs: str) -> DiffusionRequest:
    payloads = [encode(hub.publish("request", tree)) for tree in trees]
    sent = DiffusionRequest("", [Image.new("RGB", (2, 2))], payloads=payloads, inputs=inputs)
    return DiffusionRequest.from_args(sent.to_args())


def test_rows_of_several_payloads_are_joined_and_released(hub: RelayHub) -> None:
    rows = torch.arange(20.0).reshape(5, 4)
    given = request(hub, [{"rows": rows[:3]}, {"rows": rows[3:4]}, {"rows": rows[4:]}], prompt_embeds="rows")
    read = pull_inputs(given, hub)
    assert torch.equal(read.tensors["prompt_embeds"], rows)
    assert len(read.images) == 1
    assert hub.num_bytes_leased == 0


def test_pixels_become_images_behind_those_of_the_request(hub: RelayHub) -> None:
    pixels = torch.randint(0, 255, (2, 3, 4, 3), dtype=torch.uint8)
    read = pull_inputs(request(hub, [{"images": pixels}], image="images"), hub)
    assert [image.size for image in read.images] == [(2, 2), (4, 3), (4, 3)]
    assert read.tensors == {}
    assert read.images[1].getpixel((1, 2)) == tuple(pixels[0, 2, 1].tolist())


def test_a_key_that_was_not_published_is_named(hub: RelayHub) -> None:
    given = request(hub, [{"rows": torch.zeros(1, 4)}], prompt_embeds="row")
    with pytest.raises(RelayBroken, match=r"have no tensor 'row': did you mean 'rows'"):
        pull_inputs(given, hub)
    assert hub.num_bytes_leased == 0


class Pipeline:
    device, dtype = torch.device("cpu"), torch.bfloat16

    def __call__(
        self, prompt: str = "", prompt_embeds: torch.Tensor | None = None, ip_embeds: "list[torch.Tensor]" = ()
    ) -> None: ...


def test_tensors_have_the_form_that_the_pipeline_takes() -> None:
    rows = torch.zeros(5, 4)
    given = DiffusionRequest("", tensors={"prompt_embeds": rows, "ip_embeds": rows})
    arguments = pipeline_arguments(Pipeline(), given)
    assert "prompt" not in arguments
    assert (arguments["prompt_embeds"].shape, arguments["prompt_embeds"].dtype) == ((1, 5, 4), torch.bfloat16)
    assert [one.shape for one in arguments["ip_embeds"]] == [(5, 4)]
    with pytest.raises(TypeError, match=r"Pipeline takes no 'embeds': .*prompt_embeds"):
        pipeline_arguments(Pipeline(), DiffusionRequest("", tensors={"embeds": rows}))
