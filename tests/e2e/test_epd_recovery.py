"""A tiny LLaVA-1.5 with adapters, as one instance that encodes and one that does the rest: killed ones restart."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import save_file
from vllm.lora.request import LoRARequest

from tests.e2e.engines import MARKS, NUM_TOKENS, UPSTREAM, engine_here, greedy, make_image, tokens_of
from tests.e2e.test_epd_instances import assigned
from tests.processes import paused
from vllm_omni import OmniLLM
from vllm_omni.engine.instances import InstanceGroup
from vllm_omni.errors import InvalidRequest
from vllm_omni.process.status import StageState
from vllm_omni.testing.llava import TINY

pytestmark = [*MARKS, pytest.mark.long]  # without adapters: test_epd_instances.py

LONG = 100
RANK = 8
# vLLM's CPU kernels take one request at a time where there are adapters; an instance that encodes has none.
ENGINE: dict[str, Any] = {**UPSTREAM, "enable_lora": True, "max_lora_rank": RANK}
ONE_AT_A_TIME = {"max_num_seqs": 1}
NUM_IMAGES = 3


def make_prompts(first: int = 0) -> list[dict[str, Any]]:
    prompts: list[dict[str, Any]] = [
        {"prompt": f"<s> w{number} <image> w{number + 3}", "multi_modal_data": {"image": make_image(first + number)}}
        for number in range(NUM_IMAGES)
    ]
    return [*prompts, {"prompt": "<s> w1 w2"}]


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> LoRARequest:
    """In PEFT's layout, large enough to change the text."""
    path = tmp_path_factory.mktemp("adapter")
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for layer in range(TINY.num_layers):
        for module in ("q_proj", "v_proj"):
            name = f"base_model.model.language_model.model.layers.{layer}.self_attn.{module}"
            tensors[f"{name}.lora_A.weight"] = torch.randn(RANK, TINY.hidden_size, generator=generator)
            tensors[f"{name}.lora_B.weight"] = 4 * torch.randn(TINY.hidden_size, RANK, generator=generator)
    save_file(tensors, path / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"], "bias": "none"}
    (path / "adapter_config.json").write_text(json.dumps(config))
    return LoRARequest("adapter", 1, str(path))


class Upstream(NamedTuple):
    """Replies of vLLM without this project."""

    plain: list[list[int]]
    adapted: list[list[int]]
    long: list[int]  # adapted, to the first prompt


@pytest.fixture(scope="module")
def upstream(llava_checkpoint: Path, adapter: LoRARequest) -> Upstream:
    prompts = make_prompts()
    with engine_here(llava_checkpoint, **ENGINE | ONE_AT_A_TIME) as llm:
        plain, adapted = (
            tokens_of(llm.generate(prompts, greedy(), lora_request=lora, use_tqdm=False)) for lora in (None, adapter)
        )
        (long,) = tokens_of(llm.generate(prompts[0], greedy(max_tokens=LONG), lora_request=adapter, use_tqdm=False))
    assert all(one != other for one, other in zip(plain, adapted, strict=True))
    return Upstream(plain, adapted, long)


@pytest.fixture(scope="module")
def omni(llava_checkpoint: Path, upstream: Upstream) -> Iterator[OmniLLM]:
    epd = {"instances": {"E": 1, "PD": 1}, "engine_args": {"PD": ONE_AT_A_TIME}}
    with OmniLLM(llava_checkpoint, **ENGINE, epd=epd) as omni:
        yield omni


@pytest.fixture(scope="module")
def group(omni: OmniLLM) -> InstanceGroup:
    group = omni.engine.orchestrator.nodes["language"]
    assert isinstance(group, InstanceGroup)
    return group


async def read(omni: OmniLLM, prompt: Any, adapter: LoRARequest | None, num_tokens: int = NUM_TOKENS) -> list[int]:
    tokens: list[int] = []
    async for output in omni.engine.generate(prompt, greedy(max_tokens=num_tokens), lora_request=adapter):
        tokens += output.outputs[0].token_ids
    return tokens


async def read_all(omni: OmniLLM, adapter: LoRARequest) -> tuple[list[list[int]], list[list[int]]]:
    """Replies to every prompt, at once: without the adapter, and with it."""
    replies = await asyncio.gather(*(read(omni, prompt, lora) for prompt in make_prompts() for lora in (None, adapter)))
    return replies[::2], replies[1::2]


def test_an_adapter_answers_as_in_one_engine(
    omni: OmniLLM, group: InstanceGroup, upstream: Upstream, adapter: LoRARequest
) -> None:
    for _ in range(2):  # the second time with images and prefixes that are cached
        assert omni.run(read_all(omni, adapter)) == (upstream.plain, upstream.adapted)
    assert omni.run(omni.engine.list_loras()) == {1}
    # The adapter is the language model's alone, so an image is one with it and without.
    assert group.statistics().num_encoded == NUM_IMAGES


def test_a_missing_adapter_fails_only_its_request(omni: OmniLLM, upstream: Upstream, adapter: LoRARequest) -> None:
    async def run() -> list[Any]:
        (prompt, *_), missing = make_prompts(), LoRARequest("missing", 2, "/nowhere")
        return await asyncio.gather(read(omni, prompt, missing), read(omni, prompt, adapter), return_exceptions=True)

    rejected, answered = omni.run(run())
    assert isinstance(rejected, InvalidRequest) and "/nowhere" in str(rejected)
    assert answered == upstream.adapted[0]


def test_killed_instances_restart_and_no_request_is_lost(
    omni: OmniLLM, group: InstanceGroup, upstream: Upstream, adapter: LoRARequest
) -> None:
    async def while_it_encodes() -> Any:
        omni.engine.orchestrator.forget_images()
        encoder = group.engines["language/E0"]
        vars(encoder.llm).pop("_supported_tasks", None)  # as before its first request, which asks for them
        with paused(*encoder.pids()):
            replies = asyncio.create_task(read_all(omni, adapter))
            await assigned(group, "E")
            encoder.kill()
            return await replies

    async def while_it_writes() -> list[int]:
        tokens: list[int] = []
        async for output in omni.engine.generate(make_prompts()[0], greedy(max_tokens=LONG), lora_request=adapter):
            if not tokens:
                group.engines["language/PD0"].kill()
            tokens += output.outputs[0].token_ids
        return tokens

    async def back() -> None:
        async with asyncio.timeout(120):
            while not all(map(group.is_available, group.engines)):  # noqa: ASYNC110  # a thread changes it
                await asyncio.sleep(0.05)

    assert omni.run(while_it_encodes()) == (upstream.plain, upstream.adapted)  # by PD alone
    assert group.statistics().num_redone
    assert group.engines["language/E0"].current_status().state is StageState.RESTARTING
    # No other instance has the language model: the reply continues when the instance has restarted.
    assert omni.run(while_it_writes()) == upstream.long
    omni.run(back())
    before = group.statistics()
    assert omni.run(read_all(omni, adapter)) == (upstream.plain, upstream.adapted)
    after = group.statistics()
    assert after.num_redone == before.num_redone
    # The image of the long reply may have been encoded once more while no instance could resume it.
    assert after.num_encoded - before.num_encoded in (NUM_IMAGES - 1, NUM_IMAGES)
    assert all(after.num_tasks[name] > before.num_tasks[name] for name in group.engines)
    report = omni.engine.stage_report()
    assert {(status.state, status.num_restarts) for status in report.values()} == {(StageState.RUNNING, 1)}
