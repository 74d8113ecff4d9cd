"""Have a server say a text, and write or play the speech while it is made.

vllm serve Qwen/Qwen2.5-Omni-7B --omni
python examples/speech_client.py --text "Once upon a time there was a king." --output story.mp3
python examples/speech_client.py --format wav --player "ffplay -nodisp -autoexit -i -"
"""

import argparse
import shlex
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from openai import OpenAI


@contextmanager
def sink(options: argparse.Namespace) -> Iterator[IO[bytes]]:
    """Where the bytes go: into a file, or into a program that plays what it reads."""
    if options.player is None:
        with options.output.open("wb") as file:
            yield file
    else:
        with subprocess.Popen(shlex.split(options.player), stdin=subprocess.PIPE) as player:
            assert player.stdin is not None
            yield player.stdin


def main() -> None:
    parser = argparse.ArgumentParser(description="Have a server say a text, and write or play it while it is made.")
    parser.add_argument("--base-url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--text", default="Hello. I am being heard before I have been said.")
    parser.add_argument("--voice", default="Chelsie")
    parser.add_argument("--format", default="mp3", help="wav, pcm, flac, mp3, opus or aac (default: %(default)s)")
    parser.add_argument("--output", type=Path, default=Path("speech.mp3"))
    parser.add_argument("--player", help="a command that plays its standard input, instead of a file")
    parser.add_argument("--max-codes", type=int, default=400, help="of the speech, 50 a second (default: %(default)s)")
    options = parser.parse_args()

    with OpenAI(base_url=options.base_url, api_key="none") as client, sink(options) as output:
        model = client.models.list().data[0].id
        started = time.perf_counter()
        with client.audio.speech.with_streaming_response.create(
            model=model,
            input=options.text,
            voice=options.voice,
            response_format=options.format,
            stream_format="audio",  # without it, the answer is one whole file
            extra_body={"max_new_tokens": options.max_codes},
        ) as response:
            num_bytes = 0
            for piece in response.iter_bytes():
                if not num_bytes:
                    print(f"first audio after {time.perf_counter() - started:.2f} s", flush=True)
                num_bytes += len(piece)
                output.write(piece)
        print(f"all {num_bytes} bytes after {time.perf_counter() - started:.2f} s")
    if options.player is None:
        print(options.output.resolve())


if __name__ == "__main__":
    main()
