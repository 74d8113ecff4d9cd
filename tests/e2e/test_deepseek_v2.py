"""DeepSeek-V2, whose pages have latents instead of keys and values, split by stage: ids as transformers' own.

In processes, as deployed: vLLM keeps rotary tables by process, and its kernel for them is wrong here (``engine_args``).
"""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from vllm_omni import OmniLLM
from vllm_omni.testing.deepseek_v2 import build

pytestmark = [pytest.mark.timeout(400), pytest.mark.long]

PROMPTS = ["a b c d", "hello there, what is a relay? " * 6, "x" * 200, "one page and a half of them: " * 4]
NUM_TOKENS = 24
SETTINGS = {"dtype": "float32", "max_model_len": 512, "block_size": 32, "max_num_batched_tokens": 128}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("deepseek"))


@pytest.fixture(scope="module")
def expected(checkpoint: Path) -> list[list[int]]:
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    answers = []
    for prompt in PROMPTS:
        ids = torch.tensor([tokenizer.encode(prompt)])
        made = model.generate(ids, max_new_tokens=NUM_TOKENS, do_sample=False, eos_token_id=None)
        answers.append(made[0, ids.shape[1] :].tolist())
    return answers


@pytest.mark.parametrize("epd", [None, "P:1,D:1"])
def test_the_ids_are_those_of_transformers(checkpoint: Path, expected: list[list[int]], epd: str | None) -> None:
    # Without compilation vLLM would use the kernel.
    eager = {"enforce_eager": True, "attention_backend": "CPU_MLA", "kv_cache_memory_bytes": 16 << 20}
    with OmniLLM(checkpoint, epd=epd, **SETTINGS, **eager) as omni:
        params = {"temperature": 0.0, "max_tokens": NUM_TOKENS, "ignore_eos": True}
        outputs = omni.generate(PROMPTS, params, use_tqdm=False)
    assert [list(output.outputs[0].token_ids) for output in outputs] == expected
