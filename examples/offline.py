"""Ask a model in text, get text and speech, without a server.

python examples/offline.py --model Qwen/Qwen2.5-Omni-7B --prompt "Tell me a story."
"""

import argparse
from pathlib import Path

from vllm_omni import OmniLLM


def main() -> None:
    parser = argparse.ArgumentParser(description="Ask a model in text, get text and speech.")
    parser.add_argument("--model", required=True, help="directory or hub name of a checkpoint")
    parser.add_argument("--prompt", default="Who are you, and what can you hear and see?")
    parser.add_argument("--output-dir", type=Path, default=Path("output"), help="where the speech goes")
    parser.add_argument("--max-tokens", type=int, default=32, help="of the text (default: %(default)s)")
    parser.add_argument("--max-codes", type=int, default=400, help="of the speech, 50 a second (default: %(default)s)")
    options = parser.parse_args()

    print(f"starting the stages of {options.model} ...", flush=True)
    # Small and not compiled, so that it starts soon; leave both out for speed.
    with OmniLLM(options.model, max_model_len=4096, enforce_eager=True) as omni:
        (output,) = omni.chat(
            [{"role": "user", "content": options.prompt}],
            {"thinker": {"max_tokens": options.max_tokens}, "talker": {"max_tokens": options.max_codes}},
        )

    options.output_dir.mkdir(parents=True, exist_ok=True)
    path = output.save_audio(options.output_dir / "answer.wav")
    num_seconds = len(output.multimodal_output["audio"]) / output.multimodal_output["sample_rate"]
    print(f"text    {output.outputs[0].text!r}")
    print(f"speech  {path.resolve()} ({num_seconds:.1f} s)")
    print("time    " + ", ".join(f"{stage} {seconds:.2f} s" for stage, seconds in output.stage_durations.items()))


if __name__ == "__main__":  # stages are processes that import this file
    main()
