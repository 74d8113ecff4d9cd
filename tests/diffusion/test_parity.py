"""Every supported pipeline against diffusers run alone."""

import pytest
import torch

from tests.diffusion.requests import difference, make_request, results, run, run_diffusers
from vllm_omni.testing import diffusion as tiny

TOLERANCE = 1e-5  # sums in another order, in the pictures' scale of 0 to 1
PIPELINES = tiny.PIPELINES


@pytest.mark.parametrize("name", PIPELINES)
def test_a_request_alone_is_diffusers_to_the_bit(name, load_tiny, make_stepper):
    pipeline = load_tiny(name)
    request = make_request(pipeline)
    theirs = run_diffusers(pipeline, request)
    ours = results(run(make_stepper(name), {"a": request}))["a"]
    assert difference(ours, theirs) == 0.0


@pytest.mark.parametrize("name", PIPELINES)
def test_four_staggered_requests_that_differ_in_all_are_as_alone(name, load_tiny, make_stepper):
    pipeline = load_tiny(name)
    requests = {f"r{index}": make_request(pipeline, index) for index in range(4)}
    stepper = make_stepper(name)
    with torch.no_grad():
        theirs = {key: run_diffusers(pipeline, request) for key, request in requests.items()}
    ours = results(run(stepper, requests, together=2))
    assert {key: difference(ours[key], theirs[key]) for key in requests} == pytest.approx(
        dict.fromkeys(requests, 0.0), abs=TOLERANCE
    )
    assert max(stepper.statistics().widths) >= 3


@pytest.mark.parametrize("name", [name for name in PIPELINES if name != "hunyuan-image"])
def test_the_same_request_twice_is_the_same_to_the_bit(name, load_tiny, make_stepper):
    request = make_request(load_tiny(name), 1)
    stepper = make_stepper(name)
    first = results(run(stepper, {"a": request}))["a"]
    second = results(run(stepper, {"b": request}))["b"]
    assert difference(first, second) == 0.0
