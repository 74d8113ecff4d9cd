"""The configuration of a stage. Stages with engines: tests/entrypoints/test_async_omni.py, tests/e2e/."""

from pathlib import Path
from typing import Any, get_args

import pytest
from transformers import AutoConfig
from vllm.sampling_params import RequestOutputKind, SamplingParams, StructuredOutputsParams

from tests.cases import case
from vllm_omni.config import load_config
from vllm_omni.config.model import EngineType
from vllm_omni.engine.engine_maker import check_default_params
from vllm_omni.engine.kinds import ENGINE_KINDS
from vllm_omni.engine.stage import StageEngine
from vllm_omni.engine.stage_params import own_params
from vllm_omni.errors import ConfigError, InvalidRequest, OmniError
from vllm_omni.messages.stage_step import stage_args
from vllm_omni.model_executor.pipeline import RequestContext, StageRequest, StageSpec, find_pipeline_cls
from vllm_omni.testing import llava as llava
from vllm_omni.testing import qwen2_5_omni


def test_budgets_with_asynchronous_steps_are_rejected_before_the_start(tmp_path: Path) -> None:
    path = llava.build(tmp_path)
    overrides = ["language.epd.tpot_ms=30", "language.async_scheduling=true"]
    config = load_config(path, dtype="float32", enforce_eager=True, stage_overrides=overrides)
    hf_config = AutoConfig.from_pretrained(path)
    pipeline = find_pipeline_cls(config.model_type)(str(path), hf_config)
    with pytest.raises(ConfigError, match="'language': async_scheduling = True: with budgets"):
        StageEngine(config.stages[0], pipeline.stages[0])


@pytest.fixture(scope="module")
def talker(tmp_path_factory: pytest.TempPathFactory) -> StageEngine:
    """Its codes are not text. Not started."""
    return make_talker(qwen2_5_omni.build(tmp_path_factory.mktemp("checkpoint")))


def make_talker(path: Path, **params: Any) -> StageEngine:
    return make_stage(path, "talker", params)


def make_stage(path: Path, name: str, params: dict[str, Any]) -> StageEngine:
    config = load_config(path, overrides={"stages": {name: {"default_sampling_params": params}}})
    pipeline = find_pipeline_cls(config.model_type)(str(path), AutoConfig.from_pretrained(path))
    stage = config.stage(name)
    engine = StageEngine(stage, pipeline.stages[stage.stage_id])
    check_default_params(engine)
    return engine


@pytest.mark.parametrize(
    "params",
    [
        {"stop_token_ids": [5, -1]},
        {"stop_token_ids": [100_000]},
        {"logit_bias": {100_000: 1.0}},
        {"allowed_token_ids": [100_000]},
        {"logprob_token_ids": [100_000]},
        {"stop": ["a"]},
        {"bad_words": ["a"]},
        {"structured_outputs": StructuredOutputsParams(regex="a")},
    ],
    ids=str,
)
def test_parameters_are_checked_against_the_vocabulary_of_their_stage(
    talker: StageEngine, params: dict[str, Any]
) -> None:
    (name,) = params
    with pytest.raises(InvalidRequest, match=f"'talker': .*{name}") as raised:
        talker.check_params(SamplingParams(**params), params)
    assert raised.value.param == name


@pytest.mark.parametrize(
    ("fixed", "message"),
    [
        ({"min_tokens": 3}, "'talker': min_tokens must be less than or equal to max_tokens=2, got 3"),
        ({"detokenize": False}, "'talker': stop strings are only supported when detokenize is True"),
        ({"max_tokens": "4"}, "'talker': Expected `int"),
        ({"logit_bias": {5: object()}}, "'talker': Encoding objects of type object"),
    ],
    ids=["contradiction", "text", "type", "no data"],
)
def test_fields_that_contradict_a_users_are_rejected_before_an_engine_decodes_them(
    fixed: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidRequest, match=message):
        own_params("talker", SamplingParams(max_tokens=2, stop=["a"]), fixed)


def test_codes_are_valid_parameters_of_a_talker(talker: StageEngine) -> None:
    params = {"stop_token_ids": [5], "logit_bias": {5: 1.0}, "min_tokens": 4, "logprobs": 2, "detokenize": False}
    talker.check_params(SamplingParams(**params), params)


def test_a_deployments_default_beyond_the_vocabulary_is_rejected_before_the_start(talker: StageEngine) -> None:
    with pytest.raises(ConfigError, match=r"default_sampling_params: stage 'talker': .*\[100000\]"):
        make_talker(Path(talker.config.model), stop_token_ids=[100_000])


def test_a_parameter_that_the_model_needs_otherwise_is_rejected(talker: StageEngine) -> None:
    with pytest.raises(InvalidRequest, match=r"'talker': detokenize = True: the model of this stage needs .* False"):
        talker.check_params(SamplingParams(), {"detokenize": True})
    path = Path(talker.config.model)
    make_stage(path, "token2wav", {"max_tokens": 1, "seed": 3})
    with pytest.raises(ConfigError, match=r"default_sampling_params: .*'token2wav': max_tokens = 5: .* max_tokens = 1"):
        make_stage(path, "token2wav", {"max_tokens": 5})


WRONG_ARGS: list[tuple[dict[str, Any], str]] = [
    ({"payloads": "rows"}, r"Expected `array`, got `str` - at `\$.payloads`"),
    ({"payloads": [], "num_own_tokens": "1"}, r"\$.num_own_tokens"),
    ({"num_own_tokens": 1}, "num_own_tokens: needs payloads"),
    ({"payloads": [], "frame_chunks": {"first": 0, "size": 4}}, r"\$.frame_chunks.first"),
    ({"frame_chunks": {"first": 1, "size": 4}}, "frame_chunks: needs payloads"),
    ({"readers": 5}, r"\$.readers"),
    ({"row_names": "n"}, r"\$.row_names"),
]


async def test_a_pipelines_wrong_arguments_fail_their_request_before_an_engine_reads_them(talker: StageEngine) -> None:
    context = RequestContext("r", {"talker": SamplingParams()}, {})
    prompt = {"type": "token", "prompt_token_ids": [1]}
    right = {"payloads": (b"rows",), "num_own_tokens": 1, "speaker_index": 0}
    _, params = await talker.prepare(StageRequest(prompt, right), context, frozenset({"audio"}))
    assert right.items() <= stage_args(params).items()
    for args, why in WRONG_ARGS:
        with case(args), pytest.raises(OmniError, match=f"the pipeline failed: stage 'talker': its arguments: .*{why}"):
            await talker.prepare(StageRequest(prompt, args), context, frozenset({"audio"}))


async def test_an_engine_answers_in_one_piece_where_nothing_reads_pieces(talker: StageEngine) -> None:
    given = SamplingParams(max_tokens=5, extra_args={"mine": 1})
    kinds = {True: RequestOutputKind.FINAL_ONLY, False: RequestOutputKind.DELTA}
    for is_whole, kind in kinds.items():
        request = StageRequest({"prompt_token_ids": [1]}, {"readers": []}, is_read_whole=is_whole)
        args = talker.config, StageSpec("talker", "", "text"), request, given, frozenset({"text"})
        _, params = await talker.kind.engine_request(*args)
        assert params.output_kind is kind
    assert (given.output_kind, given.extra_args) == (RequestOutputKind.CUMULATIVE, {"mine": 1})
    assert not given.skip_clone, "it may be another request's, too"


def test_without_a_compiler_a_model_is_not_compiled(
    talker: StageEngine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = Path(talker.config.model)
    assert not make_talker(path).vllm_config.model_config.enforce_eager
    monkeypatch.setenv("CXX", "/nowhere/g++")
    assert make_talker(path).vllm_config.model_config.enforce_eager
    assert "no C++ compiler ('/nowhere/g++'" in caplog.text


def test_every_engine_type_of_a_deployment_has_a_kind() -> None:
    assert set(ENGINE_KINDS) == set(get_args(EngineType))
