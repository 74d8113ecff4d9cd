"""Film a sentence without a server: tell how far it is, show previews, and save the video.

python examples/video_offline.py --model Wan-AI/Wan2.2-TI2V-5B-Diffusers --prompt "A tram in the rain."
"""

import argparse
import asyncio
from pathlib import Path
from typing import Any

from PIL import Image

from vllm_omni import AsyncOmni, DiffusionParams


async def film(omni: AsyncOmni, options: argparse.Namespace) -> None:
    prompt: dict[str, Any] = {"prompt": options.prompt}
    if options.image is not None:
        prompt["multi_modal_data"] = {"image": Image.open(options.image).convert("RGB")}
    params = DiffusionParams(
        height=options.height,
        width=options.width,
        num_frames=options.num_frames,
        fps=options.fps,
        num_inference_steps=options.steps,
        seed=1,
        progress=True,
        preview_every=options.preview_every,
    )
    try:
        async for output in omni.generate(prompt, params):
            if output.preview is not None:
                output.preview.save(options.output.with_suffix(".preview.png"))
            if output.progress is not None:
                print(f"step {output.progress.step} of {output.progress.num_steps}", flush=True)
            if output.finished:
                (path,) = output.save(options.output)
                print(path.resolve())
    finally:
        await omni.aclose()


def main() -> None:
    parser = argparse.ArgumentParser(description="Film a sentence, and tell how far it is.")
    parser.add_argument("--model", required=True, help="directory or hub name of a pipeline of diffusers")
    parser.add_argument("--prompt", default="A tram in the rain, seen from a bridge.")
    parser.add_argument("--image", type=Path, help="what to begin with, for a pipeline that takes an image")
    parser.add_argument("--height", type=int, default=480)
    parser.add_argument("--width", type=int, default=832)
    parser.add_argument("--num-frames", type=int, default=81)
    parser.add_argument("--fps", type=int, default=16)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--preview-every", type=int, default=10, help="steps; 0: never (default: %(default)s)")
    parser.add_argument("--output", type=Path, default=Path("video.mp4"), help=".mp4, .webm or .gif")
    options = parser.parse_args()
    asyncio.run(film(AsyncOmni(options.model), options))  # the stage starts before there is an event loop


if __name__ == "__main__":  # stages are processes that import this file
    main()
