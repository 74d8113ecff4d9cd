"""Have a server draw, and look on: OpenAI's client, a stream of partial images and then the picture.

vllm serve Qwen/Qwen-Image --omni
python examples/images_client.py --prompt "A cat in the snow." --size 1024x1024
"""

import argparse
import base64
from pathlib import Path

from openai import OpenAI


def main() -> None:
    parser = argparse.ArgumentParser(description="Have a server draw, and look on.")
    parser.add_argument("--base-url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--prompt", default="A cat in the snow.")
    parser.add_argument("--size", default="512x512", help="width x height in pixels (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=30, help="of denoising (default: %(default)s)")
    parser.add_argument("--output", type=Path, default=Path("picture.png"))
    options = parser.parse_args()

    with OpenAI(base_url=options.base_url, api_key="none") as client:
        stream = client.images.generate(
            model=client.models.list().data[0].id,
            prompt=options.prompt,
            size=options.size,
            stream=True,
            partial_images=2,
            extra_body={"num_inference_steps": options.steps, "seed": 1},
        )
        for event in stream:
            path = options.output
            if event.type == "image_generation.partial_image":
                path = path.with_stem(f"{path.stem}-{event.partial_image_index}")
            path.write_bytes(base64.b64decode(event.b64_json))
            print(path.resolve(), flush=True)


if __name__ == "__main__":
    main()
