"""What the page shows of a model, without engines."""

from pathlib import Path
from typing import Any

import pytest
from vllm.sampling_params import SamplingParams

from vllm_omni.config import load_config
from vllm_omni.config.diffusion_params import DiffusionParams
from vllm_omni.config.vllm_args import make_sampling_params
from vllm_omni.engine.orchestrator import Orchestrator
from vllm_omni.entrypoints.page.model import HIDDEN, OF_ROUTES, describe_graph, describe_parameters


@pytest.fixture
def graph(tiny_checkpoint: Path) -> dict[str, Any]:
    return describe_graph(Orchestrator(load_config(tiny_checkpoint)), "qwen2_5_omni", "tiny")


def test_a_graph_has_its_modalities_and_who_makes_them(graph: dict[str, Any]) -> None:
    assert graph["model"] == "tiny"
    assert graph["modalities"] == {"text": "text", "audio": "audio"}
    assert graph["makers"] == {"text": "thinker", "audio": "token2wav"}


def test_a_graph_has_the_edges_between_nodes_and_those_from_and_to_the_user(graph: dict[str, Any]) -> None:
    edges = {(one["source"], one["target"]): one for one in graph["edges"]}
    assert edges[None, "thinker.generate"]["target_field"] == "prompt"
    assert edges["thinker.generate", "talker.generate"]["streamed"]
    assert edges["token2wav.decode", None]["target_field"] == "audio"
    assert {one["role"] for one in graph["nodes"]} == {"thinker", "talker", "token2wav"}


def test_parameters_are_those_that_a_request_may_give() -> None:
    for one in describe_parameters(SamplingParams, SamplingParams(), HIDDEN):
        value = {"integer": 1, "number": 0.5, "boolean": True, "string": "x"}[one["type"]]
        needs = {"routed_experts_prompt_start": 0, "prompt_logprob_start": 0}
        make_sampling_params({one["name"]: needs.get(one["name"], value)})
    for one in describe_parameters(DiffusionParams, DiffusionParams(), OF_ROUTES):
        value = {"integer": 1, "number": 0.5, "boolean": True, "string": "x"}[one["type"]]
        DiffusionParams.of({one["name"]: value}).validate()


def test_a_parameter_has_its_type_and_the_default() -> None:
    described = list(describe_parameters(SamplingParams, SamplingParams(temperature=0.25, max_tokens=7), HIDDEN))
    found = {one["name"]: (one["type"], one["default"]) for one in described}
    assert found["temperature"] == ("number", 0.25)
    assert found["max_tokens"] == ("integer", 7)
    assert found["ignore_eos"] == ("boolean", False)
    assert found["stop"][0] == "string"
    assert not {"logit_bias", "stop_token_ids", "extra_args", "_eos_token_id", "output_kind", "n"} & found.keys()
