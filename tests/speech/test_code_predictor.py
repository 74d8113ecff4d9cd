"""Residual codes equal those of transformers, alone and in a batch."""

import pytest
import torch
from transformers.models.qwen3_omni_moe.configuration_qwen3_omni_moe import Qwen3OmniMoeTalkerCodePredictorConfig
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import (
    Qwen3OmniMoeTalkerCodePredictorModelForConditionalGeneration as Reference,
)

from tests import machine
from vllm_omni.errors import ConfigError
from vllm_omni.speech.code_predictor import CodePredictor, PredictorConfig
from vllm_omni.speech.residual_sampling import CodeSampling, SamplingBatch


def make_reference(**sizes):
    section = {
        "vocab_size": 24, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16, "num_code_groups": 6, "max_position_embeddings": 64,
    } | sizes  # fmt: skip
    config = Qwen3OmniMoeTalkerCodePredictorConfig(**section)
    reference = Reference._from_config(config).eval()
    for parameter in reference.parameters():
        torch.nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5 if parameter.dim() > 1 else 0.3)
    return reference


def make_predictor(reference):
    predictor = CodePredictor(PredictorConfig.of(reference.config.to_dict()), reference.config.hidden_size)
    predictor.load_state_dict(reference.state_dict())
    return predictor.eval()


def greedy(num_rows):
    return SamplingBatch([CodeSampling()] * num_rows, [None] * num_rows)


@pytest.mark.parametrize("sizes", [{}, {"num_code_groups": 16, "num_key_value_heads": 4}, {"num_hidden_layers": 1}])
@torch.inference_mode()
def test_greedy_codes_and_embeddings_equal_the_reference(sizes):
    torch.manual_seed(len(sizes))
    reference = make_reference(**sizes)
    predictor = make_predictor(reference)
    size, num_residual = reference.config.hidden_size, reference.config.num_code_groups - 1
    hidden, first = torch.randn(7, size), torch.randn(7, size)
    codes = predictor(hidden, first, greedy(7))
    for row in range(7):
        expected = reference.generate(
            inputs_embeds=torch.stack((hidden[row], first[row]))[None], max_new_tokens=num_residual, do_sample=False
        )
        assert codes[row].tolist() == expected[0].tolist()
    tables = reference.get_input_embeddings()
    embedding = sum(table(codes[:, group]) for group, table in enumerate(tables))
    assert (predictor.embed(codes) - embedding).abs().max() < 1e-6


@torch.inference_mode()
def test_sampled_codes_depend_on_the_request_s_seed_and_not_on_the_batch():
    torch.manual_seed(3)
    predictor = make_predictor(make_reference())
    hidden, first = torch.randn(3, 32), torch.randn(3, 32)
    params = [CodeSampling(0.9, top_k=5), CodeSampling(), CodeSampling(1.3, top_p=0.8)]
    seeds = [11, None, 5]

    def generators(seeds):
        return [None if seed is None else torch.Generator().manual_seed(seed) for seed in seeds]

    together = predictor(hidden, first, SamplingBatch(params, generators(seeds)))
    for row in range(3):
        batch = SamplingBatch([params[row]], generators([seeds[row]]))
        assert predictor(hidden[row : row + 1], first[row : row + 1], batch)[0].tolist() == together[row].tolist()
    other = predictor(hidden, first, SamplingBatch(params, generators([12, None, 6])))
    assert other[1].tolist() == together[1].tolist()
    assert other[0].tolist() != together[0].tolist() and other[2].tolist() != together[2].tolist()


@pytest.mark.long
@torch.inference_mode()
def test_a_compiled_pass_predicts_the_same_codes_at_every_position_and_beside_batches():
    machine.require("g++")
    torch.manual_seed(4)
    reference = make_reference()
    plain, predictor = make_predictor(reference), make_predictor(reference)
    torch._dynamo.utils.counters.clear()
    predictor.compile_frames(8)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2, "of one row, and of several"
    table = predictor.model.norm.weight
    with torch.compiler.set_stance("fail_on_recompile"):
        for num_rows in (1, 3, 1):
            hidden, first = torch.randn(num_rows, 32), torch.randn(num_rows, 32)
            codes = predictor(hidden, first, greedy(num_rows))
            assert codes.tolist() == plain(hidden, first, greedy(num_rows)).tolist()
        x, caches = torch.randn(6, 1, 1, 32), [one.model.new_cache(table[None]) for one in (plain, predictor)]
        for position, row in enumerate(x):
            expected, got = (
                one.model.advance(row, cache, position) for one, cache in zip((plain, predictor), caches, strict=True)
            )
            assert (got - expected).abs().max() < 1e-5
        table.zero_()  # compiled code reads the parameters, which a new version of the weights overwrites
        assert not predictor.model.advance(x[0], caches[1], 0).any()


def test_samples_follow_the_truncated_distribution():
    probabilities = torch.tensor([0.05, 0.4, 0.3, 0.25])
    params = CodeSampling(1.0, top_k=3, top_p=0.6)  # the third reaches beyond 0.6 / 0.95
    num_rows = 20_000
    batch = SamplingBatch([params] * num_rows, [torch.Generator().manual_seed(1)] * num_rows)
    logits = probabilities.log().expand(num_rows, 4)
    noise = batch.noise(1, 4, torch.device("cpu"))[0]
    counts = torch.bincount(batch.sample(logits, noise), minlength=4) / num_rows
    assert counts[0] == 0 and counts[3] == 0
    assert (counts[1] - 0.4 / 0.7).abs() < 0.02


def test_an_incomplete_configuration_is_rejected_with_the_missing_fields():
    with pytest.raises(ConfigError, match="head_dim"):
        PredictorConfig.of({"hidden_size": 32})
