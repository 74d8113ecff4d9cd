"""Ask a server with OpenAI's own client: the text and the speech as they come.

vllm serve Qwen/Qwen2.5-Omni-7B --omni
python examples/openai_client.py --prompt "Tell me a story."
"""

import argparse
import base64
from pathlib import Path

from openai import OpenAI


def main() -> None:
    parser = argparse.ArgumentParser(description="Ask a server in text, get text and speech.")
    parser.add_argument("--base-url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--prompt", default="Who are you, and what can you hear and see?")
    parser.add_argument("--output", type=Path, default=Path("answer.wav"))
    parser.add_argument("--max-tokens", type=int, default=32, help="of the text (default: %(default)s)")
    parser.add_argument("--max-codes", type=int, default=400, help="of the speech, 50 a second (default: %(default)s)")
    options = parser.parse_args()

    with OpenAI(base_url=options.base_url, api_key="none") as client, options.output.open("wb") as output:
        chunks = client.chat.completions.create(
            model=client.models.list().data[0].id,
            messages=[{"role": "user", "content": options.prompt}],
            max_tokens=options.max_tokens,
            modalities=["text", "audio"],
            audio={"voice": "Chelsie", "format": "wav"},
            stream=True,
            # What OpenAI's API has no word for: how the stages behind the text are sampled.
            extra_body={"sampling_params_list": {"talker": {"max_tokens": options.max_codes}}},
        )
        for chunk in chunks:
            delta = chunk.choices[0].delta
            print(delta.content or "", end="", flush=True)
            if delta.audio and delta.audio.data:
                output.write(base64.b64decode(delta.audio.data))
    print(f"\n{options.output.resolve()}")


if __name__ == "__main__":
    main()
