"""Draw pictures without a server, and save them.

python examples/images_offline.py --model Qwen/Qwen-Image --prompt "A cat in the snow." --prompt "A dog on the beach."
"""

import argparse
from pathlib import Path

from vllm_omni import DiffusionParams, OmniLLM


def main() -> None:
    parser = argparse.ArgumentParser(description="Draw pictures, all of them at once.")
    parser.add_argument("--model", required=True, help="directory or hub name of a pipeline of diffusers")
    parser.add_argument("--prompt", action="append", required=True, help="may be repeated")
    parser.add_argument("--size", type=int, default=512, help="height and width in pixels (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=30, help="of denoising (default: %(default)s)")
    parser.add_argument("--output-dir", type=Path, default=Path("output"))
    options = parser.parse_args()

    options.output_dir.mkdir(parents=True, exist_ok=True)
    params = DiffusionParams(height=options.size, width=options.size, num_inference_steps=options.steps, seed=1)
    with OmniLLM(options.model) as omni:
        # One picture each; the denoiser works on several in a batch. A list of parameters has one for each prompt.
        for index, output in enumerate(omni.generate(options.prompt, params)):
            for path in output.save(options.output_dir / f"picture-{index}.png"):
                print(path.resolve())


if __name__ == "__main__":  # stages are processes that import this file
    main()
