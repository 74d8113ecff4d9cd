"""Run the package ``qwen-tts`` on checkpoints and write what it answers. ``make_golden.py`` calls it.

    python generate.py CHECKPOINT CASES.json OUT.safetensors [CHECKPOINT CASES.json OUT.safetensors ...]

Runs in an environment of its own, as the package needs transformers 4.57.3. Greedy, float32, one thread.
"""

import json
import sys
import types
from importlib.machinery import ModuleSpec
from pathlib import Path

import transformers  # noqa: F401  (it looks for some of the modules below)

# Read by the 25 Hz tokenizer alone, whose checkpoints are not published.
for name in ("sox", "onnxruntime", "torchaudio", "torchaudio.compliance", "torchaudio.compliance.kaldi"):
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__spec__ = ModuleSpec(name, None)
sys.modules["torchaudio"].compliance = sys.modules["torchaudio.compliance"]
sys.modules["torchaudio.compliance"].kaldi = sys.modules["torchaudio.compliance.kaldi"]

import numpy as np  # noqa: E402
import torch  # noqa: E402
from qwen_tts import Qwen3TTSModel  # noqa: E402
from safetensors.torch import save_file  # noqa: E402
from waves import make_wave  # noqa: E402

GREEDY = {"do_sample": False, "subtalker_dosample": False}


class Recorder:
    """Keeps what the talker is given and what it answers."""

    def __init__(self, model: Qwen3TTSModel) -> None:
        self.talker = model.model.talker
        self._generate = self.talker.generate
        self.talker.generate = self.generate

    def generate(self, **kwargs: object) -> object:
        self.prompt_rows = kwargs["inputs_embeds"][0].clone()
        self.tail = kwargs["trailing_text_hidden"][0].clone()
        result = self._generate(**kwargs)
        self.hidden = torch.cat([step[0][-1][0, -1:] for step in result.hidden_states])
        return result


def answer(model: Qwen3TTSModel, recorder: Recorder, case: dict) -> dict[str, torch.Tensor]:
    arguments = dict(case["arguments"]) | GREEDY
    tensors: dict[str, torch.Tensor] = {}
    codes: list[torch.Tensor] = []
    tokenizer = model.model.speech_tokenizer
    decode = tokenizer.decode

    def recorded_decode(items: list[dict], *args: object) -> object:
        codes.extend(item["audio_codes"] for item in items)
        return decode(items, *args)

    tokenizer.decode = recorded_decode
    try:
        match case["kind"]:
            case "custom_voice":
                waves, _ = model.generate_custom_voice(**arguments)
            case "voice_design":
                waves, _ = model.generate_voice_design(**arguments)
            case "clone":
                sound = make_wave(**case["reference"]), case["reference"].get("rate", 24000)
                mode = arguments.pop("x_vector_only_mode", False)
                items = model.create_voice_clone_prompt(sound, arguments.pop("ref_text", None), mode)
                tensors["x_vector"] = items[0].ref_spk_embedding
                if items[0].ref_code is not None:
                    tensors["reference_codes"] = items[0].ref_code.to(torch.int16)
                waves, _ = model.generate_voice_clone(voice_clone_prompt=items, **arguments)
    finally:
        tokenizer.decode = decode
    num_reference = len(tensors.get("reference_codes", ()))
    return {
        **tensors,
        "prompt_rows": recorder.prompt_rows,
        "tail": recorder.tail,
        "hidden": recorder.hidden,
        "codes": codes[0][num_reference:].to(torch.int16),
        "wave": torch.from_numpy(np.asarray(waves[0], dtype=np.float32)),
    }


def generate(checkpoint: str, cases: str, out: str) -> None:
    model = Qwen3TTSModel.from_pretrained(checkpoint, dtype=torch.float32)
    recorder = Recorder(model)
    tensors = {}
    for case in json.loads(Path(cases).read_text(encoding="utf-8")):
        answered = answer(model, recorder, case)
        print(case["name"], {name: tuple(tensor.shape) for name, tensor in answered.items()}, flush=True)
        tensors |= {f"{case['name']}.{name}": tensor.contiguous() for name, tensor in answered.items()}
    save_file(tensors, out)


def main() -> None:
    torch.set_num_threads(1)
    words = sys.argv[1:]
    for first in range(0, len(words), 3):
        generate(*words[first : first + 3])


if __name__ == "__main__":
    main()
