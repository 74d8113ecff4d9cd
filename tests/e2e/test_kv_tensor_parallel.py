"""A tiny Llama's pages go between engines of one rank and of two, with a head for each rank and with the same one."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from vllm import LLM, SamplingParams

from tests.e2e.test_kv_migration import OMNI, Router, kv_config, tokens_of
from tests.reference import llama

pytestmark = pytest.mark.slow

NUM_TOKENS = 8
PROMPTS: list[dict[str, Any]] = [
    {"prompt_token_ids": [5 + (number * 7 + place * place) % 100 for place in range(length)]}
    for number, length in enumerate((5, 33, 100, 100))
]


def make_engine(checkpoint: Path, tp_size: int, **engine: Any) -> LLM:
    return LLM(
        str(checkpoint),
        dtype="float32",
        enforce_eager=True,
        max_model_len=256,
        max_num_seqs=4,
        block_size=32,
        skip_tokenizer_init=True,
        enable_prefix_caching=False,
        tensor_parallel_size=tp_size,
        kv_transfer_config=kv_config("kv_both"),
        additional_config={"relay": {"transport": "shm", "num_bytes": 4 << 20}},
        **OMNI,
        **engine,
    )


@pytest.fixture(scope="module", params=[2, 1], ids=["a head for each rank", "one head for both"])
def engines(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[int, LLM]]:
    checkpoint = llama.build(tmp_path_factory.mktemp("llama"), request.param)
    made = {tp_size: make_engine(checkpoint, tp_size) for tp_size in (1, 2)}
    yield made
    for engine in made.values():
        engine.llm_engine.engine_core.shutdown()


@pytest.mark.parametrize("sizes", [(1, 2), (2, 1)], ids=["to two ranks", "to one rank"])
def test_a_target_with_other_ranks_answers_as_one_engine_does(engines: dict[int, LLM], sizes: tuple[int, int]) -> None:
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    expected = tokens_of(engines[1].generate(PROMPTS, params, use_tqdm=False))
    router = Router()
    source, target = (engines[size] for size in sizes)
    announced = router.prefill(source, PROMPTS)
    answers = router.decode(target, announced, PROMPTS, [params] * len(PROMPTS))
    assert tokens_of(answers) == expected
    # With another prompt's pages it says something else: they are what it answers from.
    mistaken = {**announced[2], "pages": announced[3]["pages"]}
    assert tokens_of(router.decode(target, [mistaken], PROMPTS[2:3], [params])) != expected[2:3]
    router.release(announced)
    router.hub.close()
