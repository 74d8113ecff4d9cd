"""What workers change of vLLM before their engine starts."""

import pytest
import torch
from vllm.v1.sample import sampler
from vllm.v1.sample.sampler import Sampler

from vllm_omni.vllm_patches import uncompiled_logprob_ranks


def test_log_probabilities_need_no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        sampler, "batched_count_greater_than", sampler.batched_count_greater_than
    )  # restored at the end
    uncompiled_logprob_ranks()
    logits = torch.tensor([[0.5, 2.0, 1.0, -1.0], [3.0, 0.0, 1.0, 2.0]])
    with torch.compiler.set_stance("fail_on_recompile"):
        logprobs = Sampler().gather_logprobs(logits.log_softmax(-1), 1, torch.tensor([2, 1]))
    assert logprobs.selected_token_ranks.tolist() == [2, 4]
    assert logprobs.logprob_token_ids.tolist() == [[2, 1], [1, 0]]
