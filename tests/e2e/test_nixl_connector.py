"""A deployment may name another connector: vLLM's NixlConnector moves pages between engines with our scheduler."""

import socket
from pathlib import Path
from typing import Any

import pytest
from vllm import LLM, SamplingParams

from tests.e2e.test_kv_migration import OMNI, tokens_of
from tests.reference import llama

pytestmark = pytest.mark.slow

PROMPTS: list[dict[str, Any]] = [
    {"prompt_token_ids": [5 + (number * 7 + place * place) % 100 for place in range(length)]}
    for number, length in enumerate((10, 64, 97, 97))
]


def make_engine(checkpoint: Path, role: str, monkeypatch: pytest.MonkeyPatch) -> LLM:
    with socket.create_server(("127.0.0.1", 0)) as free:
        monkeypatch.setenv("VLLM_NIXL_SIDE_CHANNEL_PORT", str(free.getsockname()[1]))
    return LLM(
        str(checkpoint),
        dtype="float32",
        enforce_eager=True,
        max_model_len=256,
        max_num_seqs=4,
        block_size=32,
        skip_tokenizer_init=True,
        enable_prefix_caching=False,
        kv_transfer_config={"kv_connector": "NixlConnector", "kv_role": role, "kv_buffer_device": "cpu"},
        **OMNI,
    )


def test_vllms_own_connector_moves_pages_between_our_engines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("nixl")
    checkpoint = llama.build(tmp_path)
    source, target = (make_engine(checkpoint, role, monkeypatch) for role in ("kv_producer", "kv_consumer"))
    try:
        params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
        expected = tokens_of(target.generate(PROMPTS, params, use_tqdm=False))
        task = SamplingParams(
            max_tokens=1, extra_args={"kv_transfer_params": {"do_remote_decode": True, "do_remote_prefill": False}}
        )
        announced = [one.kv_transfer_params or {} for one in source.generate(PROMPTS, task, use_tqdm=False)]
        assert all(one["do_remote_prefill"] for one in announced)
        # The last is asked with the pages of the one before it, and says something else: pages are what is moved.
        own = [SamplingParams(temperature=0, max_tokens=8, ignore_eos=True) for _ in PROMPTS]
        for one, announcement in zip(own, [*announced[:3], announced[2]], strict=True):
            one.extra_args = {"kv_transfer_params": announcement}
        answers = tokens_of(target.generate(PROMPTS, own, use_tqdm=False))
        assert answers[:3] == expected[:3] and answers[3] != expected[3]
    finally:
        for engine in (source, target):
            engine.llm_engine.engine_core.shutdown()
