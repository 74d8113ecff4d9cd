"""Engines in processes of their own: one encodes for another, whose tokens are those of a single upstream engine.

Other models, and whole mixes, are in ``test_epd_models.py`` and ``test_epd_instances.py``.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from vllm import LLM, RequestOutput

from tests.e2e.engines import MARKS, OMNI, Prompt, engine_apart, engine_here, greedy, kill, make_image, upstream_answers
from tests.e2e.engines import tokens_of as tokens
from vllm_omni.messages.payload import decode
from vllm_omni.relay.hub import RelayHub, RelayOptions
from vllm_omni.testing import llava as llava

pytestmark = MARKS

NUM_SEEDS = 10
ENCODE_ONLY = {"encode_only": True}


def settings(ec_role: str, transport: str = "shm", epd: dict[str, Any] | None = None, **engine: Any) -> dict[str, Any]:
    ec_transfer_config = {
        "ec_connector": "RelayECConnector",
        "ec_connector_module_path": "vllm_omni.kv.ec_connector",
        "ec_role": ec_role,
        "ec_connector_extra_config": {"pull_timeout_s": 5},
    }
    relay = {"transport": transport, "num_bytes": 1 << 20, "inline_bytes": 0}
    more = {"ec_transfer_config": ec_transfer_config, "additional_config": {"relay": relay, "epd": epd or {}}}
    return {**OMNI, **more, **engine}


def make_prompts(seed: int) -> list[Prompt]:
    """One image, two, and one that recurs; named by content, as a front end does."""
    images = [make_image(4 * seed + number) for number in range(4)]

    def make(text: str, *numbers: int) -> Prompt:
        return {
            "prompt": text,
            "multi_modal_data": {"image": [images[number] for number in numbers]},
            "multi_modal_uuids": {"image": [f"{seed}-{number}" for number in numbers]},
        }

    return [
        make("<s> w1 <image> w4", 0),
        make("<s> <image> w1 <image> w2", 1, 2),
        make("<s> w7 w8 <image> w9 <image> w3", 3, 0),
    ]


def run(llm: LLM, prompts: list[Prompt], params: list[dict[str, Any] | None]) -> list[RequestOutput]:
    sampling = [greedy(extra_args={"ec_transfer_params": one} if one is not None else None) for one in params]
    return llm.generate(prompts, sampling, use_tqdm=False)


def num_encoded(outputs: list[RequestOutput]) -> list[int]:
    return [output.ec_transfer_params["num_encoded"] for output in outputs]


def encode_on(llm: LLM, prompts: list[Prompt]) -> list[dict[str, Any]]:
    """The parameters that each request to a consumer carries."""
    outputs = run(llm, prompts, [ENCODE_ONLY] * len(prompts))
    assert tokens(outputs) == [[]] * len(prompts)
    return [{"images": output.ec_transfer_params["images"]} for output in outputs]


@pytest.fixture(scope="module")
def upstream(llava_checkpoint: Path) -> list[list[list[int]]]:
    """By seed of the prompts."""
    prompts = [prompt for seed in range(NUM_SEEDS) for prompt in make_prompts(seed)]
    answers = tokens(upstream_answers(llava_checkpoint, prompts))
    return [answers[first : first + 3] for first in range(0, len(answers), 3)]


@pytest.fixture(scope="module")
def encoder(llava_checkpoint: Path) -> Iterator[LLM]:
    """E: no cache blocks, no language model. vLLM keeps tables per process, which are without data then."""
    with engine_apart(llava_checkpoint, **settings("ec_producer")) as llm:
        yield llm


@pytest.fixture(scope="module")
def consumer(llava_checkpoint: Path, upstream: list[list[list[int]]]) -> Iterator[LLM]:
    """PD, with a prefix cache."""
    with engine_here(llava_checkpoint, **settings("ec_consumer")) as llm:
        yield llm


@pytest.fixture(scope="module")
def both(llava_checkpoint: Path) -> Iterator[LLM]:
    """Encodes for others by another transport, in slices beside its own tokens; without a prefix cache."""
    epd = {"token_budget": 64, "image_budget": 2 * llava.NUM_IMAGE_TOKENS, "num_encode_layers": 1}
    with engine_apart(llava_checkpoint, **settings("ec_both", "tcp", epd, enable_prefix_caching=False)) as llm:
        yield llm


def test_a_consumer_answers_as_upstream_does_and_encodes_nothing(
    upstream: list[list[list[int]]], encoder: LLM, consumer: LLM
) -> None:
    prompts = make_prompts(0)
    outputs = run(consumer, prompts, encode_on(encoder, prompts))
    assert tokens(outputs) == upstream[0]
    assert len({tuple(one) for one in tokens(outputs)}) == len(prompts)  # or the images would not matter
    assert num_encoded(outputs) == [0, 0, 0]


@pytest.mark.long
def test_without_a_prefix_cache_it_does_so_too(upstream: list[list[list[int]]], encoder: LLM, both: LLM) -> None:
    prompts = make_prompts(1)
    outputs = run(both, prompts, encode_on(encoder, prompts))
    assert tokens(outputs) == upstream[1]
    assert num_encoded(outputs) == [0, 0, 0]


@pytest.mark.long
def test_an_engine_encodes_for_another_beside_its_own_requests(
    upstream: list[list[list[int]]], both: LLM, consumer: LLM
) -> None:
    own, others = make_prompts(2), make_prompts(3)
    outputs = run(both, [*own, *others], [None] * 3 + [ENCODE_ONLY] * 3)
    assert tokens(outputs[:3]) == upstream[2]
    assert sum(num_encoded(outputs)) == 8
    params = [{"images": output.ec_transfer_params["images"]} for output in outputs[3:]]
    answers = run(consumer, others, params)
    assert tokens(answers) == upstream[3]
    assert num_encoded(answers) == [0, 0, 0]


def test_an_image_that_an_encoder_knows_is_not_encoded_again(encoder: LLM) -> None:
    prompts = make_prompts(4)
    first, second = (run(encoder, prompts, [ENCODE_ONLY] * 3) for _ in range(2))
    assert sum(num_encoded(first)) == 4 and sum(num_encoded(second)) == 0
    assert [set(one.ec_transfer_params["images"]) for one in first] == [
        set(one.ec_transfer_params["images"]) for one in second
    ]


def test_images_that_the_front_end_released_are_encoded_by_the_consumer(
    upstream: list[list[list[int]]], encoder: LLM, consumer: LLM
) -> None:
    prompts = make_prompts(5)
    (before,) = encoder.collective_rpc("relay_statistics")
    params = encode_on(encoder, prompts)
    front_end = RelayHub(RelayOptions())
    for one in params:
        for payload in one["images"].values():
            front_end.release_payload(decode(payload), for_all=True)
    front_end.close()
    (after,) = encoder.collective_rpc("relay_statistics")
    assert after["shm"]["num_leases"] == before["shm"]["num_leases"]
    outputs = run(consumer, prompts, params)
    assert tokens(outputs) == upstream[5]
    assert sum(num_encoded(outputs)) == 4


def test_an_encoder_rejects_a_text_and_a_request_for_an_answer(encoder: LLM) -> None:
    answer, text = run(encoder, [make_prompts(7)[0], {"prompt": "<s> w1"}], [None, ENCODE_ONLY])
    assert "only encodes" in answer.ec_transfer_params["error"]
    assert "nothing to encode" in text.ec_transfer_params["error"]


# -- the last tests: a killed engine is not started again --------------------------------------------------------------


@pytest.mark.parametrize("source", ["encoder", pytest.param("both", marks=pytest.mark.long)])
def test_images_of_a_killed_engine_are_encoded_by_the_consumer(
    source: str, upstream: list[list[list[int]]], consumer: LLM, request: pytest.FixtureRequest
) -> None:
    seed = 8 + (source == "both")
    prompts = make_prompts(seed)
    engine: LLM = request.getfixturevalue(source)
    params = encode_on(engine, prompts)
    kill(engine)
    outputs = run(consumer, prompts, params)
    assert tokens(outputs) == upstream[seed]
    assert sum(num_encoded(outputs)) == 4
