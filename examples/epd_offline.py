"""Ask a model about images, with engines that encode, prefill and decode separately; print the tasks of each.

python examples/epd_offline.py --model llava-hf/llava-1.5-7b-hf --epd E:1,PD:1 --image cat.png --image dog.png
"""

import argparse
from pathlib import Path

from PIL import Image

from vllm_omni import OmniLLM


def main() -> None:
    parser = argparse.ArgumentParser(description="Ask about images, with several instances.")
    parser.add_argument("--model", required=True, help="directory or hub name of a checkpoint that reads images")
    parser.add_argument("--epd", default="E:1,PD:1", help="kinds and numbers of instances (default: %(default)s)")
    parser.add_argument("--image", type=Path, action="append", required=True, help="an image; may be repeated")
    parser.add_argument(
        "--prompt",
        default="USER: <image>\nWhat is in this picture? ASSISTANT:",
        help="with the model's placeholder for an image (default: %(default)r)",
    )
    parser.add_argument(
        "--max-tokens", type=int, default=32, help="maximum length of each answer (default: %(default)s)"
    )
    options = parser.parse_args()

    prompts = [
        {"prompt": options.prompt, "multi_modal_data": {"image": Image.open(path).convert("RGB")}}
        for path in options.image
    ]
    print(f"starting {options.epd} of {options.model} ...", flush=True)
    # Without compilation the start is fast; leave enforce_eager out for speed.
    with OmniLLM(options.model, epd=options.epd, enforce_eager=True) as omni:
        outputs = omni.generate(prompts, {"temperature": 0, "max_tokens": options.max_tokens}, use_tqdm=False)
        statistics = omni.engine.instance_statistics()

    for path, output in zip(options.image, outputs, strict=True):
        print(f"{path.name}: {output.outputs[0].text!r} ({output.stage_durations['total']:.2f} s)")
    for name, stage in statistics.items():
        print(f"{name}: {stage.num_encoded} images encoded, {stage.num_migrations} KV caches migrated")
        print("  " + ", ".join(f"{instance} had {number} tasks" for instance, number in stage.num_tasks.items()))


if __name__ == "__main__":  # instances are processes that import this file
    main()
