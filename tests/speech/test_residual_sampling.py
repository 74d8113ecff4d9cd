"""Codes are those of a stable sort of all codes, whatever the parameters, the seed and the rest of the batch."""

import pytest
import torch

from vllm_omni.speech.residual_sampling import CodeSampling, SamplingBatch, most_likely

TOP_K = [CodeSampling(0.9, top_k=50), CodeSampling(0.7, top_k=5, top_p=0.8), CodeSampling(2.0, top_k=1, top_p=0.1)]
GREEDY = CodeSampling()
ALL_CODES = [CodeSampling(1.3, top_p=0.8), CodeSampling(1.0), CodeSampling(0.5, top_p=0.01)]
BATCHES = {
    "top k": TOP_K,
    "top k and greedy": [*TOP_K, GREEDY],
    "top k above the number of codes": [*TOP_K, CodeSampling(1.1, top_k=3000, top_p=0.9)],
    "greedy and a large top k": [CodeSampling(top_k=9000), CodeSampling(1.0, top_k=600), GREEDY],
    "all codes": ALL_CODES,
    "all codes and greedy": [GREEDY, *ALL_CODES],
    "mixed": [ALL_CODES[0], TOP_K[1], GREEDY, ALL_CODES[1], TOP_K[0], ALL_CODES[2], TOP_K[2]],
}


def code_of_a_sort(logits: torch.Tensor, noise: torch.Tensor, params: CodeSampling) -> int:
    if params.temperature == 0:
        return int(logits.argmax())
    values, order = (logits.float() / params.temperature).sort(descending=True, stable=True)
    if params.top_k:
        values, order = values[: params.top_k], order[: params.top_k]
    probabilities = values.softmax(-1)
    probabilities[probabilities.cumsum(-1) - probabilities >= params.top_p] = 0.0
    return int(order[(probabilities / noise[order]).argmax()])


def noise_of(batch: SamplingBatch, size: int) -> torch.Tensor:
    return batch.noise(1, size, torch.device("cpu"))[0]


@pytest.mark.parametrize("params", BATCHES.values(), ids=BATCHES.keys())
@pytest.mark.parametrize("size", [24, 2048])
def test_codes_equal_those_of_a_sort_for_any_parameters_and_seeds(params, size):
    torch.manual_seed(0)
    for seed in range(10):
        generators = [torch.Generator().manual_seed(100 * seed + row) for row in range(len(params))]
        batch = SamplingBatch(params, generators)
        logits, noise = torch.randn(len(params), size) * 3, noise_of(batch, size)
        logits[:, 3] = float("-inf")
        expected = [code_of_a_sort(*row) for row in zip(logits, noise, params, strict=True)]
        assert batch.sample(logits, noise).tolist() == expected


def test_of_equal_logits_top_k_takes_the_first_in_any_batch():
    torch.manual_seed(0)
    logits = (torch.randn(3, 2048) * 3).bfloat16()  # a few hundred different values
    for seed in range(30):
        generators = [torch.Generator().manual_seed(10 * seed + row) for row in range(3)]
        noise = noise_of(SamplingBatch(TOP_K, generators), 2048)
        expected = [code_of_a_sort(*row) for row in zip(logits, noise, TOP_K, strict=True)]
        for rest in ([], [CodeSampling(1.0, top_k=500)], ALL_CODES):
            batch = SamplingBatch([*TOP_K, *rest], [None] * (3 + len(rest)))
            more = len(rest)
            rows = torch.cat((logits, logits[:1].expand(more, -1))), torch.cat((noise, torch.ones(more, 2048)))
            assert batch.sample(*rows)[:3].tolist() == expected


def test_the_most_likely_codes_are_in_the_order_of_a_stable_sort():
    logits = torch.tensor([[0.0, -2.5, float("-inf"), -0.0, 1e-40, 3.0, -1e30, 3.0, -2.5, float("inf"), 0.0]])
    expected, order = logits.sort(dim=-1, descending=True, stable=True)
    for num in (1, 4, 8, 11, 20):
        values, codes = most_likely(logits, num)
        assert codes.tolist() == order[:, :num].tolist() and values.tolist() == expected[:, :num].tolist()


@pytest.mark.parametrize("params", BATCHES.values(), ids=BATCHES.keys())
def test_parameters_put_into_a_batch_without_top_k_give_the_same_codes(params):  # as into a graph's
    torch.manual_seed(0)
    batch = SamplingBatch(params, [torch.Generator().manual_seed(row) for row in range(len(params))])
    fixed = SamplingBatch([CodeSampling(1.0, top_p=0.5)] * 8, [None] * 8)
    fixed.replace(batch)
    logits, noise = torch.randn(8, 2048) * 3, torch.ones(8, 2048)
    noise[: len(params)] = noise_of(batch, 2048)
    codes = batch.sample(logits[: len(params)], noise[: len(params)])
    assert fixed.sample(logits, noise)[: len(params)].tolist() == codes.tolist()
