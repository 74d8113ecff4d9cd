"""Routing to experts that compute nothing, on the CPU. In a model: tests/e2e/test_longcat_flash.py."""

import torch

from vllm_omni.worker.zero_experts import choose_experts, scale_by_zero_experts

LOGITS = torch.tensor([[2.0, 1.0, 0.0, -1.0], [0.0, 0.0, 1.0, 3.0]])


def test_a_bias_changes_which_experts_are_chosen_and_not_their_weights() -> None:
    scores = LOGITS.softmax(dim=-1)
    for bias, chosen in (((0, 0, 0, 0), [{0, 1}, {2, 3}]), ((0, 0, 9, 0), [{0, 2}, {2, 3}])):
        weights, experts = choose_experts(torch.empty(2, 0), LOGITS, torch.tensor(bias, dtype=torch.float32), 2, False)
        assert [set(one) for one in experts.tolist()] == chosen
        assert torch.equal(weights, scores.gather(1, experts.long()))
        assert (weights.dtype, experts.dtype) == (torch.float32, torch.int32)


def test_indices_have_the_type_that_is_asked_for() -> None:
    _, experts = choose_experts(torch.empty(2, 0), LOGITS, torch.zeros(4), 1, False, indices_type=torch.int64)
    assert experts.tolist() == [[0], [3]] and experts.dtype is torch.int64


def test_experts_that_compute_nothing_add_the_input_by_their_weights() -> None:
    hidden = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
    experts = torch.tensor([[0, 1], [1, 2], [2, 3]])  # 2 and 3 compute nothing
    scales = torch.tensor([[0.5, 0.5], [0.25, 0.5], [0.5, 1.0]])
    added = scale_by_zero_experts(experts, scales, 2, "identity", hidden)
    assert added.tolist() == [[0.0, 0.0], [1.5, 2.0], [7.5, 9.0]]
    assert scales.tolist() == [[0.5, 0.5], [0.25, 0.5], [0.5, 1.0]]  # unchanged
