"""Say a text without a server, and write the speech to a file while it is made.

python examples/speech_offline.py --model Qwen/Qwen2.5-Omni-7B --text "Once upon a time there was a king."
"""

import argparse
import asyncio
import time
from pathlib import Path

import soundfile

from vllm_omni import AsyncOmni


async def speak(omni: AsyncOmni, options: argparse.Namespace) -> None:
    sample_rate = omni.orchestrator.pipeline.sample_rate
    num_pieces = 0
    started = time.perf_counter()
    try:
        with soundfile.SoundFile(options.output, "w", samplerate=sample_rate, channels=1) as file:
            params = {"talker": {"max_tokens": options.max_codes}}
            async for output in omni.speak(options.text, params, speaker=options.voice):
                samples = output.multimodal_output["audio"]
                if len(samples) and not num_pieces:
                    print(f"first audio after {time.perf_counter() - started:.2f} s", flush=True)
                num_pieces += 1
                file.write(samples.numpy())
            num_seconds = file.frames / sample_rate
        elapsed_s = time.perf_counter() - started
        print(f"all {num_seconds:.2f} s of it after {elapsed_s:.2f} s, in {num_pieces} pieces")
        print(options.output.resolve())
    finally:
        await omni.aclose()


def main() -> None:
    parser = argparse.ArgumentParser(description="Say a text, and write the speech while it is made.")
    parser.add_argument("--model", required=True, help="directory or hub name of a checkpoint")
    parser.add_argument("--text", default="Hello. I am being written before I have been said.")
    parser.add_argument("--voice", help="one of the checkpoint's; its first by default")
    parser.add_argument("--output", type=Path, default=Path("speech.wav"), help=".wav or .flac")
    parser.add_argument("--max-codes", type=int, default=400, help="of the speech, 50 a second (default: %(default)s)")
    options = parser.parse_args()

    # The stages start before there is an event loop. Small and not compiled, so that they start soon.
    asyncio.run(speak(AsyncOmni(options.model, max_model_len=4096, enforce_eager=True), options))


if __name__ == "__main__":  # stages are processes that import this file
    main()
