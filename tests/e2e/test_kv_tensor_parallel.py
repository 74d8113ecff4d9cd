"""A tiny Llama's pages go between engines of one rank and of two that have the same head.

With a head for each rank they go through the router, in ``test_epd_ranks.py``.
"""

from collections.abc import Iterator
from typing import Any

import pytest
from vllm import LLM

from tests.e2e.engines import MARKS, OMNI, engine_apart, engine_here, greedy, tokens_of
from tests.e2e.test_kv_migration import Router, kv_config
from tests.reference import llama

pytestmark = [*MARKS, pytest.mark.long]

PROMPTS: list[dict[str, Any]] = [
    {"prompt_token_ids": [5 + (number * 7 + place * place) % 100 for place in range(length)]}
    for number, length in enumerate((5, 33, 100, 100))
]


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[int, LLM]]:
    """By number of ranks."""
    checkpoint = llama.build(tmp_path_factory.mktemp("llama"), num_key_value_heads=1)
    engine = {
        **OMNI,
        "skip_tokenizer_init": True,
        "enable_prefix_caching": False,
        "limit_mm_per_prompt": {},
        "kv_transfer_config": kv_config("kv_both"),
        "additional_config": {"relay": {"transport": "shm", "num_bytes": 4 << 20}},
    }
    with engine_apart(checkpoint, tensor_parallel_size=2, **engine) as two, engine_here(checkpoint, **engine) as one:
        yield {1: one, 2: two}


@pytest.mark.parametrize("sizes", [(1, 2), (2, 1)], ids=["to two ranks", "to one rank"])
def test_a_target_with_other_ranks_answers_as_one_engine_does(engines: dict[int, LLM], sizes: tuple[int, int]) -> None:
    params = greedy()
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
