"""``benchmarks.diffusion`` on a CUDA machine, at the sizes of a GPU. Imports no vLLM.

    python -m benchmarks.gpu_diffusion [--rounds 5] [--size 1024] [--steps 20] [--layers 20] [--heads 24]

Baseline: diffusers' own pipeline in the same process, as in ``benchmarks.diffusion``, which says what is measured.

Needs the wheels torch (a CUDA build), diffusers>=0.42,<0.43, transformers>=5, greenlet, msgspec, numpy, pillow and
safetensors, and this package on the path; nothing is downloaded. Writes the table to
``benchmarks/results/diffusion-<GPU>.md``, beside printing it.

By default the denoiser has the width of Qwen-Image's and a third of its blocks, in bfloat16: 6.8 thousand million
parameters, 13 GB.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path

import torch

from benchmarks.diffusion import Workload, make_pipeline, report, run

RESULTS = Path(__file__).parent / "results"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--size", type=int, default=1024, help="pixels of a side")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--layers", type=int, default=20)
    parser.add_argument("--heads", type=int, default=24)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("torch sees no CUDA device; benchmarks.diffusion measures on the CPU")
    device = torch.device("cuda", torch.cuda.current_device())
    workload = Workload(
        device=device,
        dtype=torch.bfloat16,
        size=options.size,
        num_steps=options.steps,
        rounds=options.rounds,
        cache_steps=options.steps,
        long_steps=5 * options.steps,
    )
    pipeline = make_pipeline(workload, num_layers=options.layers, num_heads=options.heads, head_dim=128)
    num_parameters = sum(parameter.numel() for parameter in pipeline.transformer.parameters())
    name = torch.cuda.get_device_name(device)
    machine = {
        "machine": name,
        "torch": torch.__version__,
        "parameters": f"{num_parameters / 1e6:.0f} M",
        "pixels": workload.size,
        "steps": workload.num_steps,
    }
    text = report(machine, run(pipeline, workload))
    print(text)
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"diffusion-{re.sub(r'[^A-Za-z0-9]+', '-', name).strip('-')}.md"
    path.write_text(text + "\n", encoding="utf-8")
    print(f"written to {path}")


if __name__ == "__main__":
    main()
