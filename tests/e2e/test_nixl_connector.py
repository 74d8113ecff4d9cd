"""A deployment may name another connector: vLLM's NixlConnector moves pages between engines with our scheduler."""

import socket
from pathlib import Path
from typing import Any

import pytest
from vllm import SamplingParams

from tests import machine
from tests.e2e.engines import MARKS, OMNI, engine_apart, engine_here, greedy, tokens_of
from tests.reference import llama

pytestmark = [*MARKS, pytest.mark.long]

PROMPTS: list[dict[str, Any]] = [
    {"prompt_token_ids": [5 + (number * 7 + place * place) % 100 for place in range(length)]}
    for number, length in enumerate((10, 64, 97, 97))
]


def settings(role: str) -> dict[str, Any]:
    return {
        **OMNI,
        "skip_tokenizer_init": True,
        "enable_prefix_caching": False,
        "limit_mm_per_prompt": {},
        "kv_transfer_config": {"kv_connector": "NixlConnector", "kv_role": role, "kv_buffer_device": "cpu"},
    }


def find_port() -> str:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return str(free.getsockname()[1])


def test_vllms_own_connector_moves_pages_between_our_engines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine.require("nixl")
    checkpoint = llama.build(tmp_path)
    monkeypatch.setenv("VLLM_NIXL_SIDE_CHANNEL_PORT", find_port())
    with engine_apart(checkpoint, **settings("kv_producer")) as source:
        monkeypatch.setenv("VLLM_NIXL_SIDE_CHANNEL_PORT", find_port())
        with engine_here(checkpoint, **settings("kv_consumer")) as target:
            expected = tokens_of(target.generate(PROMPTS, greedy(), use_tqdm=False))
            task = SamplingParams(
                max_tokens=1, extra_args={"kv_transfer_params": {"do_remote_decode": True, "do_remote_prefill": False}}
            )
            announced = [one.kv_transfer_params or {} for one in source.generate(PROMPTS, task, use_tqdm=False)]
            assert all(one["do_remote_prefill"] for one in announced)
            # The last is asked with the pages of the one before it, and says something else: pages are what is moved.
            own = [
                greedy(extra_args={"kv_transfer_params": announcement})
                for announcement in [*announced[:3], announced[2]]
            ]
            answers = tokens_of(target.generate(PROMPTS, own, use_tqdm=False))
            assert answers[:3] == expected[:3] and answers[3] != expected[3]
