"""How the parameters of a request are resolved, without engines."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.sampling_params import SamplingParams

from tests.cases import rejected
from vllm_omni import DiffusionParams
from vllm_omni.config import OmniConfig, StageConfig
from vllm_omni.entrypoints.stage_params import StageParamsResolver
from vllm_omni.errors import InvalidRequest


def make_resolver(*stages: dict[str, Any], check: Callable[..., None] = lambda *_: None) -> StageParamsResolver:
    configs = [StageConfig(stage_id=index, model="/m", **stage) for index, stage in enumerate(stages)]
    # The checkpoint of the first stage has a default of its own.
    model_config: Any = SimpleNamespace(get_diff_sampling_param=lambda: {"top_k": 7, "temperature": 0.5})
    return StageParamsResolver(OmniConfig(model="/m", model_type="any", stages=configs), model_config, check)


@pytest.fixture
def speech() -> StageParamsResolver:
    return make_resolver(
        {"name": "thinker", "default_sampling_params": {"temperature": 0.25}},
        {"name": "talker", "default_sampling_params": {"top_k": 40}},
    )


@pytest.fixture
def diffusion() -> StageParamsResolver:
    return make_resolver(
        {
            "name": "diffusion",
            "engine_type": "diffusion",
            "default_sampling_params": {"num_inference_steps": 20, "height": 64},
        }
    )


def test_defaults_are_the_checkpoints_then_the_deployments(speech: StageParamsResolver) -> None:
    params = speech.resolve(None)
    assert (params["thinker"].top_k, params["thinker"].temperature) == (7, 0.25)
    assert (params["talker"].top_k, params["talker"].temperature) == (40, 1.0)


def test_parameters_are_of_the_first_stage_by_position_or_by_name(speech: StageParamsResolver) -> None:
    own = SamplingParams(top_p=0.5)
    for given, expected in [
        ({"top_p": 0.5}, (0.5, 1.0)),
        (own, (0.5, 1.0)),
        ([{"top_p": 0.5}, {"top_p": 0.75}], (0.5, 0.75)),
        ([None, {"top_p": 0.75}], (1.0, 0.75)),
        ({"talker": {"top_p": 0.75}}, (1.0, 0.75)),
        ({"thinker": own, "talker": None}, (0.5, 1.0)),
        ({}, (1.0, 1.0)),
    ]:
        params = speech.resolve(given)
        assert (params["thinker"].top_p, params["talker"].top_p) == expected, given
    assert speech.resolve(own)["thinker"] is own


def test_overrides_win_over_given_parameters(speech: StageParamsResolver) -> None:
    over = speech.check_overrides({"thinker": {"top_p": 0.5}, "talker": {"seed": 3}})
    given = SamplingParams(top_p=0.75, seed=1)
    params = speech.resolve({"thinker": given, "talker": {"seed": 2, "top_p": 0.25}}, over)
    assert (params["thinker"].top_p, params["thinker"].seed) == (0.5, 1)
    assert (params["talker"].top_p, params["talker"].seed) == (0.25, 3)
    assert given.top_p == 0.75


def test_what_a_request_gives_is_told_from_defaults() -> None:
    checked = {}

    def check(stage: str, params: SamplingParams, given: dict[str, Any]) -> None:
        checked[stage] = dict(given)

    stages = {"name": "thinker"}, {"name": "talker", "default_sampling_params": {"max_tokens": 5}}, {"name": "vocoder"}
    resolver = make_resolver(*stages, check=check)
    over = resolver.check_overrides({"talker": {"seed": 3}})
    assert checked == {"talker": {"seed": 3}}
    resolver.resolve([SamplingParams(max_tokens=8), {"max_tokens": 16}], over)
    assert checked == {"thinker": {"max_tokens": 8}, "talker": {"max_tokens": 16, "seed": 3}, "vocoder": {}}


def test_stop_ids_of_an_override_replace_the_given_ones(speech: StageParamsResolver) -> None:
    over = speech.check_overrides([{"stop_token_ids": [7]}, {"stop_token_ids": [8]}])
    given = SamplingParams(stop_token_ids=[5])
    params = speech.resolve(given, over)
    assert [params[name].all_stop_token_ids for name in ("thinker", "talker")] == [{7}, {8}]
    assert given.all_stop_token_ids == {5}


def test_fields_of_a_diffusion_stage_win_over_its_defaults(diffusion: StageParamsResolver) -> None:
    for given in ({"height": 128}, DiffusionParams(height=128), [{"height": 128}], {"diffusion": {"height": 128}}):
        assert diffusion.resolve(given)["diffusion"] == DiffusionParams(height=128, num_inference_steps=20), given


def test_wrong_parameters_are_rejected_with_their_stage(
    speech: StageParamsResolver, diffusion: StageParamsResolver
) -> None:
    changed = SamplingParams()
    changed.top_k = "many"  # type: ignore[assignment]  # vLLM checks the constructor alone
    for resolver, given, message in [
        (speech, {"talkr": {}}, "unknown stage 'talkr': did you mean 'talker'"),
        (speech, {"talkr": None}, "unknown stage 'talkr': did you mean 'talker'"),
        (speech, {"thinker": {}, "max_tokens": 3}, "unknown stage 'max_tokens'"),
        (speech, {"temprature": 1}, "'thinker': temprature = 1: .*did you mean 'temperature'"),
        (speech, {"max_tokens": 3, "temprature": 1}, "'thinker': temprature = 1: .*did you mean 'temperature'"),
        (speech, [{"max_tokens": 3, "temprature": 1}], "'thinker': temprature = 1: .*did you mean 'temperature'"),
        (speech, {"extra_args": {}, "temprature": 1}, "'thinker': temprature = 1: .*did you mean 'temperature'"),
        (speech, [{}, {}, {}], "3 sets of sampling parameters for the stages thinker, talker"),
        (speech, [3], "'thinker' = 3: must be fields by name"),
        (speech, {"talker": {"temprature": 1}}, "'talker': temprature = 1: .*did you mean 'temperature'"),
        (speech, {"talker": {"temperature": -1}}, "'talker': .*temperature"),
        (speech, {"talker": {"top_k": "many"}}, "'talker': top_k = 'many': must be a whole number"),
        (speech, {"talker": {"n": 2}}, "'talker': n = 2: it answers once"),
        (speech, {"seed": 2**64}, "'thinker': seed = .*: valid: -2"),
        (speech, {"temperature": 0, "top_pp": 1}, "'thinker': top_pp = 1: .*did you mean 'top_p'"),
        (speech, {"extra_args": {"kv_transfer_params": "x"}}, "kv_transfer_params = 'x': must be an object"),
        (speech, {"talker": {"extra_args": {"ec_transfer_params": [1]}}}, "'talker': ec_transfer_params = .*an object"),
        (speech, SamplingParams(extra_args={"slo": "fast"}), "slo = 'fast': must be times by name"),
        (speech, changed, "'thinker': Expected `int`"),
        (speech, DiffusionParams(), "'thinker': it samples tokens; give SamplingParams"),
        (diffusion, SamplingParams(), "'diffusion': it samples no tokens; give DiffusionParams"),
        (diffusion, {"width": 64, "heigth": 64}, "stage 'diffusion': unknown diffusion parameter .*'height'"),
        (diffusion, {"heigth": 64}, "stage 'diffusion': unknown diffusion parameter .*did you mean 'height'"),
        (diffusion, {"width": 64, "heigth": 64}, "unknown diffusion parameter 'heigth': did you mean 'height'"),
        (diffusion, {"difusion": {}}, "unknown stage 'difusion': did you mean 'diffusion'"),
        (diffusion, {"height": 0}, "stage 'diffusion': height = 0: must be at least 1"),
    ]:
        with rejected(InvalidRequest, message, given):
            resolver.resolve(given)
    with rejected(InvalidRequest, "give the fields to change, by name", "an object"):
        speech.check_overrides([SamplingParams()])
