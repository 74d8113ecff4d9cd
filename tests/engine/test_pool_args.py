"""What a stage with a KV pool is given. The section of the deployment: tests/config/test_kv_pool.py."""

from pathlib import Path

from vllm.lora.request import LoRARequest

from tests.kv.pool.offload.builders import make_checkpoint
from vllm_omni.config.kv_pool import KVPoolConfig
from vllm_omni.engine.pool_args import with_adapter
from vllm_omni.messages.request import StageRequest

POOL = KVPoolConfig()


def salt_of(path: Path, salt: str | None = None) -> str:
    prompt = {"type": "token", "prompt_token_ids": [1]} | ({} if salt is None else {"cache_salt": salt})
    named: str = with_adapter(StageRequest(prompt), POOL, LoRARequest("name", 1, str(path))).prompt["cache_salt"]
    return named


def test_pages_of_an_adapter_are_named_by_its_weights(tmp_path: Path) -> None:
    one, same, other = (
        make_checkpoint(tmp_path / name, value) for name, value in (("one", 1.0), ("same", 1.0), ("other", 2.0))
    )
    assert salt_of(one) == salt_of(same) != salt_of(other)
    assert salt_of(one, "tenant") != salt_of(one)


def test_an_adapter_that_cannot_be_named_shares_no_pages_with_another_process(tmp_path: Path) -> None:
    (tmp_path / "adapter").mkdir()
    assert salt_of(tmp_path / "adapter") == salt_of(tmp_path / "adapter") != salt_of(tmp_path)


def test_a_request_without_an_adapter_or_pool_is_left_alone(tmp_path: Path) -> None:
    request = StageRequest({"type": "token", "prompt_token_ids": [1]})
    assert with_adapter(request, POOL, None) is request
    assert with_adapter(request, None, LoRARequest("name", 1, str(tmp_path))) is request
