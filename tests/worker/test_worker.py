"""What workers change of vLLM before their engine starts."""

import pytest
import torch
from vllm.model_executor.layers import vocab_parallel_embedding
from vllm.v1.sample import sampler
from vllm.v1.sample.sampler import Sampler

from vllm_omni.vllm_patches import uncompiled_logprob_ranks, uncompiled_vocabulary_masks


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


def test_ids_of_a_part_of_the_vocabulary_need_no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = vocab_parallel_embedding.get_masked_input_and_mask
    monkeypatch.setattr(vocab_parallel_embedding, "get_masked_input_and_mask", compiled)  # restored at the end
    uncompiled_vocabulary_masks()
    with torch.compiler.set_stance("fail_on_recompile"):
        ids, is_elsewhere = vocab_parallel_embedding.get_masked_input_and_mask(
            torch.tensor([3, 4, 7, 8]), 4, 8, 0, 8, 8
        )
    assert ids.tolist() == [0, 0, 3, 0]
    assert is_elsewhere.tolist() == [True, False, False, True]
