"""The residual codes of a frame on a CUDA machine: a graph of the whole frame, beside its operations one by one.

    python -m benchmarks.gpu_frames [--rounds 20]

Baseline: the same ``CodePredictor`` in the same process without graphs, and with its pass of one request compiled (the
CPU's way). ``floor`` is the time of the linear layers of the frame's passes, as products of their shapes in a graph of
their own.

Model: the predictor of Qwen3-TTS 1.7B (5 layers of 1024, 16 codebooks of 2048), random weights, bfloat16. Half of the
requests sample (temperature 0.9, top k 50), as a deployment's do. Imports no vLLM.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable

import torch

from vllm_omni.speech.code_predictor import CodePredictor, PredictorConfig
from vllm_omni.speech.residual_sampling import CodeSampling, SamplingBatch

CONFIG = PredictorConfig(
    hidden_size=1024,
    num_hidden_layers=5,
    num_attention_heads=16,
    num_key_value_heads=8,
    head_dim=128,
    intermediate_size=3072,
    vocab_size=2048,
    num_code_groups=16,
    rope_theta=1e6,
)
TALKER_SIZE = 2048
SIZES = (1, 16, 64)


def median_ms(call: Callable[[], object], rounds: int) -> float:
    times = []
    for _ in range(rounds + 3):
        torch.cuda.synchronize()
        started = time.perf_counter()
        call()
        torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - started))
    return statistics.median(times[3:])


def make_batch(num_rows: int) -> SamplingBatch:
    params = [CodeSampling(0.9, top_k=50) if row % 2 == 0 else CodeSampling() for row in range(num_rows)]
    return SamplingBatch(params, [torch.Generator("cuda").manual_seed(row) for row in range(num_rows)], "cuda")


def floor_graph(num_rows: int) -> torch.cuda.CUDAGraph:
    config = CONFIG
    heads, kv_heads = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
    of_layer = [
        *((config.hidden_size, size) for size in (heads, kv_heads, kv_heads)),
        (heads, config.hidden_size),
        *[(config.hidden_size, config.intermediate_size)] * 2,
        (config.intermediate_size, config.hidden_size),
    ]
    shapes = [
        *of_layer * config.num_hidden_layers,
        (config.hidden_size, config.vocab_size),
        (TALKER_SIZE, config.hidden_size),
    ]
    weights = [torch.randn(size, columns, device="cuda", dtype=torch.bfloat16) for columns, size in shapes]
    inputs = {columns: torch.randn(num_rows, columns, device="cuda", dtype=torch.bfloat16) for columns, _ in shapes}

    def products() -> None:
        for _ in range(config.num_code_groups - 1):
            for weight in weights:
                torch.nn.functional.linear(inputs[weight.shape[1]], weight)

    products()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        products()
    return graph


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("torch sees no CUDA device; benchmarks.speech measures on the CPU")
    torch.manual_seed(0)
    predictor = CodePredictor(CONFIG, TALKER_SIZE).to("cuda", torch.bfloat16).eval()
    rows = torch.randn(2, max(SIZES), TALKER_SIZE, device="cuda", dtype=torch.bfloat16)
    times: dict[str, dict[int, float]] = {}
    codes: dict[str, list[torch.Tensor]] = {}

    def measure(name: str) -> None:
        codes[name] = [predictor(*rows[:, :size], make_batch(size)) for size in SIZES]
        times[name] = {
            size: median_ms(lambda size=size: predictor(*rows[:, :size], make_batch(size)), options.rounds)  # type: ignore[misc]
            for size in SIZES
        }

    measure("one by one")
    predictor.model.compile_pass()
    measure("compiled pass")
    started = time.perf_counter()
    predictor.compile_frames(max(SIZES))
    capture_s = time.perf_counter() - started
    measure("graph")
    times["floor"] = {}
    for size in SIZES:
        graph = floor_graph(size)
        times["floor"][size] = median_ms(graph.replay, options.rounds)
    equal = [torch.mean((a == b).float()).item() for a, b in zip(codes["compiled pass"], codes["graph"], strict=True)]
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}; ms for a frame, medians of {options.rounds}")
    print(f"making the graphs took {capture_s:.1f} s; codes equal to those without: {equal}\n")
    print("| | " + " | ".join(f"{size} requests" for size in SIZES) + " |")
    print("| --- |" + " --- |" * len(SIZES))
    for name, row in times.items():
        print(f"| {name} | " + " | ".join(f"{row[size]:.2f}" for size in SIZES) + " |")
    print(json.dumps({"benchmark": "gpu_frames", "capture_s": round(capture_s, 1), "equal": equal, "ms": times}))


if __name__ == "__main__":
    main()
