"""Make the golden files of Qwen3-TTS with its own package, ``qwen-tts``, in an environment made from PyPI.

    python tools/reference/qwen3_tts/make_golden.py            write tests/reference/golden/qwen3_tts/*.safetensors
    python tools/reference/qwen3_tts/make_golden.py --check    compare with them instead; exit 1 if one differs

Run it with the project's environment: the checkpoints are those of ``vllm_omni.testing.qwen3_tts``, the cases those of
``cases.json`` beside the golden files. The package's environment (420 MB) is installed into ``--environment``, and used
again where it is there already.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
GOLDEN = ROOT / "tests" / "reference" / "golden" / "qwen3_tts"
STRIDE = 7  # of the samples that are kept; coprime to the samples of a frame
TOLERANCE = 1e-5  # between two machines


def install(environment: Path) -> None:
    if (environment / "complete").exists():
        return
    requirements = HERE / "requirements.txt"
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", environment]
    subprocess.run([*command, "--requirement", requirements], check=True)
    (environment / "complete").touch()


def make(variant: str, cases: Path, environment: Path, folder: Path) -> dict[str, torch.Tensor]:
    """What the package answers to a variant's cases, by ``case.tensor``."""
    build = [sys.executable, "-m", "vllm_omni.testing.qwen3_tts", folder / variant, "--variant", variant]
    subprocess.run(build, check=True, cwd=ROOT, stdout=subprocess.DEVNULL)
    out = folder / f"{variant}.safetensors"
    paths = {**os.environ, "PYTHONPATH": str(environment), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, HERE / "generate.py", folder / variant, cases, out], check=True, env=paths)
    return {
        name: tensor[::STRIDE].clone() if name.endswith(".wave") else tensor
        for name, tensor in load_file(out).items()
        if not name.endswith(".tail")
    }


def differences(made: dict[str, torch.Tensor], kept: dict[str, torch.Tensor]) -> list[str]:
    if made.keys() != kept.keys():
        return [f"tensors: {sorted(made.keys() ^ kept.keys())}"]
    found = []
    for name, tensor in made.items():
        if tensor.shape != kept[name].shape:
            found.append(f"{name}: {tuple(tensor.shape)} instead of {tuple(kept[name].shape)}")
        elif (error := float((tensor.double() - kept[name].double()).abs().max())) > TOLERANCE:
            found.append(f"{name}: differs by {error:.1e}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--environment", type=Path, default=ROOT / "build" / "reference" / "qwen3_tts")
    options = parser.parse_args()
    install(options.environment)
    found = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for variant, cases in json.loads((GOLDEN / "cases.json").read_text(encoding="utf-8")).items():
            path = folder / f"{variant}.json"
            path.write_text(json.dumps(cases), encoding="utf-8")
            made = make(variant, path, options.environment, folder)
            golden = GOLDEN / f"{variant}.safetensors"
            if options.check:
                found += [f"{variant}: {one}" for one in differences(made, load_file(golden))]
            else:
                save_file(made, golden)
    print("\n".join(found) or ("equal to the golden files" if options.check else f"written to {GOLDEN}"))
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
