"""Frames as CUDA graphs: the codes are those of the same operations one by one."""

import pytest
import torch

from vllm_omni.speech.code_predictor import CodePredictor, PredictorConfig
from vllm_omni.speech.frame_graphs import MAX_ROWS, FrameGraphs
from vllm_omni.speech.residual_sampling import CodeSampling, SamplingBatch

CONFIG = PredictorConfig(
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    intermediate_size=48,
    vocab_size=24,
    num_code_groups=6,
)
SAMPLINGS = [CodeSampling(0.9, top_k=5), CodeSampling(), CodeSampling(1.3, top_p=0.8), CodeSampling(1.0)]


def make_batch(num_rows: int, is_greedy: bool, device: str) -> SamplingBatch:
    params = [CodeSampling()] * num_rows if is_greedy else [SAMPLINGS[row % 4] for row in range(num_rows)]
    return SamplingBatch(params, [torch.Generator(device).manual_seed(row) for row in range(num_rows)], device)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")
@torch.inference_mode()
def test_frames_of_graphs_equal_those_without_in_batches_of_any_size() -> None:
    torch.manual_seed(0)
    predictor = CodePredictor(CONFIG, CONFIG.hidden_size).cuda()
    rows = torch.randn(2, MAX_ROWS + 1, CONFIG.hidden_size, device="cuda")
    sizes = [(num_rows, is_greedy) for num_rows in (1, 3, 8, 2, MAX_ROWS, MAX_ROWS + 1) for is_greedy in (True, False)]
    expected = [predictor(*rows[:, :num], make_batch(num, greedy, "cuda")).tolist() for num, greedy in sizes]
    predictor._frames.prepare((rows[0, :1], rows[1, :1]), max_rows=200)
    assert len(predictor._frames._captured) == 14  # of 1, 2, .. MAX_ROWS, greedy and sampled
    assert [predictor(*rows[:, :num], make_batch(num, greedy, "cuda")).tolist() for num, greedy in sizes] == expected


def test_without_a_gpu_frames_are_predicted_as_they_come() -> None:
    calls: list[int] = []

    def predict(inputs, sampling, noise):
        calls.append(len(inputs[0]))
        assert (noise is None) == sampling.is_greedy
        return inputs[0].long() + (0 if noise is None else noise.shape[0])

    frames = FrameGraphs(predict, num_draws=5, vocab_size=7)
    frames.prepare((torch.zeros(1, 2),), max_rows=8)
    assert frames((torch.ones(3, 2),), make_batch(3, True, "cpu")).tolist() == [[1, 1]] * 3
    assert frames((torch.ones(2, 2),), make_batch(2, False, "cpu")).tolist() == [[6, 6]] * 2
    assert calls == [1, 2, 3, 2]
