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

from vllm_omni.testing.qwen3_tts import build

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


def make(cases_of: dict[str, list[dict]], environment: Path, folder: Path) -> dict[str, dict[str, torch.Tensor]]:
    """What the package answers to the cases of each variant, by ``case.tensor``."""
    words: list[Path] = []
    for variant, cases in cases_of.items():
        path, out = folder / f"{variant}.json", folder / f"{variant}.safetensors"
        path.write_text(json.dumps(cases), encoding="utf-8")
        words += [build(folder / variant, variant=variant), path, out]
    paths = {**os.environ, "PYTHONPATH": str(environment), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, HERE / "generate.py", *words], check=True, env=paths)
    return {variant: _kept(load_file(folder / f"{variant}.safetensors")) for variant in cases_of}


def _kept(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {
        name: tensor[::STRIDE].clone() if name.endswith(".wave") else tensor
        for name, tensor in tensors.items()
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
    cases_of = json.loads((GOLDEN / "cases.json").read_text(encoding="utf-8"))
    with tempfile.TemporaryDirectory() as name:
        for variant, made in make(cases_of, options.environment, Path(name)).items():
            golden = GOLDEN / f"{variant}.safetensors"
            if options.check:
                found += [f"{variant}: {one}" for one in differences(made, load_file(golden))]
            else:
                save_file(made, golden)
    print("\n".join(found) or ("equal to the golden files" if options.check else f"written to {GOLDEN}"))
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
