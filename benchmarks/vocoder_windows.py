"""What windows of the vocoder cost, and how far their sound is from that of a whole decode.

    python -m benchmarks.vocoder_windows [--variant wide] [--codes 545] [--runs 3]

Baseline: transformers' ``Qwen2_5OmniToken2WavModel`` over the whole utterance, same weights, codes, noise and threads,
in the same process and the same run; runs alternate. Decoded one window at a time, as for one user. Columns: codes that
must be there before the first sound; time as a share of the baseline's; the error's root mean square and its distance
from the sound in dB. For comparison, rounding to 16 bits alone has an error of 8.8e-06.

The weights are random (``vllm-omni tiny``): how fast the influence of far codes fades is a property of the weights, and
was not measured on real ones.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import torch
from transformers import Qwen2_5OmniConfig

from tests.reference.qwen2_5_omni import Reference
from vllm_omni.model_executor.models.qwen2_5_omni.token2wav import Qwen2_5OmniToken2Wav, token2wav_hf_config
from vllm_omni.model_executor.models.qwen2_5_omni.windows import WindowCutter, WindowSizes
from vllm_omni.testing import qwen2_5_omni as tiny

SIZES = [
    WindowSizes(size=0),
    WindowSizes(first=12, size=48, past=24, future=12),
    WindowSizes(first=12, size=96, past=24, future=12),
    WindowSizes(first=12, size=96, past=48, future=12),
    WindowSizes(first=12, size=96, past=24, future=24),
    WindowSizes(),
    WindowSizes(first=12, size=192, past=36, future=24),
    WindowSizes(first=24, size=96, past=48, future=36),
    WindowSizes(first=24, size=192, past=72, future=48),
]


def load(path: Path, reference: Reference) -> Qwen2_5OmniToken2Wav:
    config = token2wav_hf_config(Qwen2_5OmniConfig.from_pretrained(path))
    model_config = SimpleNamespace(hf_config=config, model=str(path), revision=None)
    vocoder = Qwen2_5OmniToken2Wav(vllm_config=SimpleNamespace(model_config=model_config)).eval()
    weights = reference.model.token2wav.state_dict()
    vocoder.load_weights((f"token2wav.{name}", tensor) for name, tensor in weights.items())
    return vocoder


@torch.inference_mode()
def decode(vocoder: Qwen2_5OmniToken2Wav, codes: list[int], speaker: str, sizes: WindowSizes) -> torch.Tensor:
    cutter = WindowCutter(sizes, vocoder.block_size // vocoder.repeats)
    windows = [*cutter.push(codes), cutter.finish()]
    requests = [vocoder.read({**window._asdict(), "seed": 0, "speaker": speaker}) for window in windows]
    return torch.cat([vocoder.generate([request])[0]["audio"] for request in requests])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variant", default="wide", choices=tiny.VARIANTS)
    parser.add_argument("--codes", type=int, default=545)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory() as directory:
        path = tiny.build(Path(directory), variant=options.variant)
        reference = Reference(path)
        vocoder = load(path, reference)
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 200, (options.codes,), generator=generator).tolist()
    speaker = next(iter(vocoder.speakers))
    baseline_s: list[float] = []
    own_s: dict[WindowSizes, list[float]] = {sizes: [] for sizes in SIZES}
    for run in range(options.runs + 1):
        started = time.perf_counter()
        whole = reference.vocode(codes, speaker)
        elapsed_s = time.perf_counter() - started
        if run:  # the first warms up
            baseline_s.append(elapsed_s)
        for sizes in SIZES:
            started = time.perf_counter()
            decode(vocoder, codes, speaker, sizes)
            if run:
                own_s[sizes].append(time.perf_counter() - started)
    rows = []
    for sizes in SIZES:
        error = (decode(vocoder, codes, speaker, sizes) - whole).pow(2).mean().sqrt().item()
        rows.append(
            {
                "first": sizes.first if sizes.size else None,
                "size": sizes.size,
                "past": sizes.past if sizes.size else None,
                "future": sizes.future if sizes.size else None,
                "codes_to_first_sound": sizes.first + sizes.future if sizes.size else options.codes,
                "time_ratio": statistics.median(own_s[sizes]) / statistics.median(baseline_s),
                "rms_error": error,
                "snr_db": 20 * torch.log10(whole.pow(2).mean().sqrt() / error).item() if error else None,
            }
        )
    print(f"{options.codes} codes, variant {options.variant}, {options.threads} thread(s), {platform.machine()}")
    print(f"transformers, whole: {statistics.median(baseline_s):.2f} s (median of {options.runs})\n")
    print("| first | size | past | future | codes to first sound | time | rms error | dB |")
    print("|---|---|---|---|---|---|---|---|")
    for row in rows:
        cells = [row["first"], row["size"] or "whole", row["past"], row["future"], row["codes_to_first_sound"]]
        cells += [f"{row['time_ratio']:.2f}", f"{row['rms_error']:.1e}", row["snr_db"] and f"{row['snr_db']:.0f}"]
        print("| " + " | ".join("" if cell is None else str(cell) for cell in cells) + " |")
    print(json.dumps({"baseline_s": statistics.median(baseline_s), "rows": rows}))


if __name__ == "__main__":
    main()
