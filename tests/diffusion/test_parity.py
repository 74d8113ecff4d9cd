"""Every supported pipeline against diffusers alone."""

import pytest
import torch

from tests.diffusion.requests import OTHERS, REPRESENTATIVE, difference, make_request, results, run, run_diffusers

TOLERANCE = 1e-5  # sums in another order; images are in the range of 0 to 1

# One pipeline for each mechanism in `make test`, all of them in `make test-long`.
all_pipelines = pytest.mark.parametrize("names", [REPRESENTATIVE, pytest.param(OTHERS, marks=pytest.mark.long)])


@all_pipelines
def test_a_request_alone_equals_diffusers_to_the_bit(names, load_tiny, make_stepper):
    for name in names:
        request = make_request(load_tiny(name))
        theirs = run_diffusers(load_tiny(name), request)
        ours = results(run(make_stepper(name), {"a": request}))["a"]
        assert difference(ours, theirs) == 0.0, name


@all_pipelines
def test_four_staggered_requests_that_differ_in_all_parameters_equal_diffusers(names, load_tiny, make_stepper):
    for name in names:
        pipeline = load_tiny(name)
        requests = {f"r{index}": make_request(pipeline, index) for index in range(4)}
        stepper = make_stepper(name)
        with torch.no_grad():
            theirs = {key: run_diffusers(pipeline, request) for key, request in requests.items()}
        ours = results(run(stepper, requests, together=2))
        assert max(difference(ours[key], theirs[key]) for key in requests) <= TOLERANCE, name
        assert max(stepper.statistics().widths) >= 3, name


@all_pipelines
def test_the_same_request_twice_is_the_same_to_the_bit(names, load_tiny, make_stepper):
    for name in names:
        request = make_request(load_tiny(name), 1)
        stepper = make_stepper(name)
        first, second = (results(run(stepper, {key: request}))[key] for key in "ab")
        assert difference(first, second) == 0.0, name
