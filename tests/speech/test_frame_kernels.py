"""Triton's kernels compute what the operations that they replace do.

Without a GPU, where Triton is installed, in its interpreter: TRITON_INTERPRET=1 python -m pytest tests/speech.
"""

import os

import pytest
import torch

from vllm_omni.speech.code_predictor import FrameTransformer, Places, PredictorConfig
from vllm_omni.speech.residual_sampling import CodeSampling, SamplingBatch

pytestmark = pytest.mark.gpu
if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("torch sees no CUDA device", allow_module_level=True)
frame_kernels = pytest.importorskip("vllm_omni.speech.frame_kernels", reason="Triton is not installed")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

PARAMS = [
    CodeSampling(0.9, top_k=5),
    CodeSampling(),
    CodeSampling(1.3, top_p=0.8),
    CodeSampling(1.0),
    CodeSampling(0.7, top_k=50, top_p=0.8),
    CodeSampling(1.0, top_k=1, top_p=0.5),
    CodeSampling(2.0, top_k=3000, top_p=0.01),
    CodeSampling(0.5, top_p=0.3),
]


@pytest.mark.parametrize("size", [2048, 1000, 24])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])  # in bfloat16 many logits are equal
def test_codes_equal_those_of_a_sort_for_any_parameters_and_seeds(dtype, size):
    torch.manual_seed(0)
    for seed in range(4):
        batch = SamplingBatch(PARAMS, [torch.Generator().manual_seed(100 * seed + row) for row in range(len(PARAMS))])
        noise = batch.noise(1, size, torch.device("cpu"))[0]
        logits = (torch.randn(len(PARAMS), size) * 3).to(dtype)
        logits[:, 3] = float("-inf")
        codes = frame_kernels.sample(logits.to(DEVICE), noise.to(DEVICE), batch._table.to(DEVICE))
        assert codes.tolist() == batch.sample(logits, noise).tolist()


@pytest.mark.parametrize("is_qwen2", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim", "length"), [(16, 8, 128, 16), (4, 4, 64, 11), (4, 1, 16, 6)])
@torch.inference_mode()
def test_attention_equals_that_of_torch_at_every_position(heads, kv_heads, head_dim, length, is_qwen2):
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 8, "vocab_size": 8}
    config = PredictorConfig(
        num_attention_heads=heads, num_key_value_heads=kv_heads, head_dim=head_dim, num_code_groups=length,
        is_qwen2=is_qwen2, attention_bias=is_qwen2, **sizes,
    )  # fmt: skip
    transformer = FrameTransformer(config).to(DEVICE)
    attention = transformer.layers[1].self_attn
    for parameter in attention.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    tables = (transformer.cos, transformer.sin, transformer.mask)
    kept = torch.randn(3, 2, 2, kv_heads, length, head_dim, device=DEVICE)[:, 1]
    for position in range(length):
        positions, x = transformer.positions[position : position + 1], torch.randn(3, 1, 64, device=DEVICE)
        places = Places(positions, transformer.positions, *(table[positions] for table in tables), tables)
        attention._joined = attention._attend = None
        expected, expected_new = attention.advance(x, kept, places)
        attention.join_weights()
        attention._attend = frame_kernels.attend
        y, new = attention.advance(x, kept, places)
        assert (y - expected).abs().max() < 1e-4 and (new - expected_new).abs().max() < 1e-5
