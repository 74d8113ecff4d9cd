"""The language model in vLLM's own loop, with patch encoder and local transformer, replies as the reference does."""

from typing import NamedTuple

import numpy as np
import pytest
import torch
from vllm import SamplingParams

from tests.e2e.engines import MARKS, engine_here
from tests.model_executor.recorded_frames import frames_of_output, record_frames
from tests.reference.mimo_audio import AudioTokenizer, Groups, LanguageModel
from vllm_omni.messages.stage_step import STAGE_ARGS
from vllm_omni.model_executor.models.mimo_audio.language_model import MiMoAudioLanguageModel
from vllm_omni.model_executor.models.mimo_audio.processing import PLACEHOLDER, SPOKEN
from vllm_omni.plugin import register
from vllm_omni.testing.mimo_audio import build

pytestmark = MARKS

LANGUAGE_MODEL = {
    "hf_overrides": {"architectures": ["MiMoAudioLanguageModel"]},
    "worker_cls": "vllm_omni.worker.cpu_worker.CPUARWorker",
    "scheduler_cls": "vllm_omni.core.sched.stream.StreamScheduler",
    "async_scheduling": False,
    "enable_prefix_caching": False,
    "limit_mm_per_prompt": {"audio": 8},
}
MAX_GROUPS = 30
A = "<|im_end|>\n<|im_start|>assistant\n"
PROMPTS = [
    f"<|im_start|>user\nPlease speak this{A}<|sostm|>",
    f"<|im_start|>user\n{PLACEHOLDER}what is that?{A}",
    f"<|im_start|>user\n{PLACEHOLDER}{A}{SPOKEN.format(text='that is a reply of ten or more tokens')}<|im_end|>\n"
    f"<|im_start|>user\n{PLACEHOLDER}{A}<|sostm|>",
    f"{PLACEHOLDER}\n{SPOKEN.format(text='hi')} \n\n{PLACEHOLDER}\n<|sostm|>",
    "no sound at all",
    f"<|im_start|>user\n{PLACEHOLDER}{PLACEHOLDER}{A}",
    f"<|im_start|>user\nthe weather is fair{A}<|sostm|>",
    f"<|im_start|>user\n{PLACEHOLDER}{A}<|sostm|>",
]


class Case(NamedTuple):
    text: str
    waves: list[np.ndarray]

    @property
    def prompt(self) -> dict:
        return {"prompt": self.text, "multi_modal_data": {"audio": self.waves} if self.waves else {}}

    def groups(self, model: LanguageModel, codec: AudioTokenizer) -> Groups:
        """The prompt as the reference makes it, piece by piece."""
        waves = iter(self.waves)

        def codes() -> torch.Tensor:
            return codec.encode(torch.from_numpy(next(waves)))[:8]

        made = model.text("")
        for piece in self.text.replace("<|sosp|>", "\0<|sosp|>").replace("<|eosp|>", "<|eosp|>\0").split("\0"):
            if piece == PLACEHOLDER:
                made += model.heard(codes())
                continue
            while "<|eot|>" in piece:
                before, _, spoken = piece.partition("<|sostm|>")
                text, _, piece = spoken.partition("<|eot|><|empty|><|eostm|>")
                made += model.text(before) + model.spoken(text, codes())
            made += model.text(piece)
        return Groups(made.tokens.long(), made.codes)  # those of an empty text are floats


def make_cases(seed: int) -> list[Case]:
    """Sounds of different lengths: full groups and others."""
    random = np.random.default_rng(seed)
    cases = []
    for index, text in enumerate(PROMPTS):
        seconds = 0.3 + 0.17 * index + random.random(text.count("<|empty|>"))
        waves = []
        for length in seconds:
            time = np.arange(int(length * 24000)) / 24000
            tone = np.sin(2 * np.pi * (150 + 400 * random.random()) * time * (1 + time))
            waves.append((0.3 * tone + 0.05 * random.standard_normal(len(time))).astype(np.float32))
        cases.append(Case(text, waves))
    return cases


def params(max_tokens: int, stop: list[int]) -> SamplingParams:
    extra_args = {STAGE_ARGS: {"payloads": []}, "code_temperature": 0.0}
    return SamplingParams(temperature=0, max_tokens=max_tokens, stop_token_ids=stop, extra_args=extra_args)


def replies_of(path, requests, monkeypatch, **engine) -> list[tuple[list[int], list[list[int]]]]:
    """Tokens, and codes of the groups of sound, of requests that run together."""
    register()
    frames = record_frames(MiMoAudioLanguageModel, monkeypatch)
    prompts, params = zip(*requests, strict=True)
    with engine_here(path, **LANGUAGE_MODEL | engine) as llm:
        outputs = llm.generate(list(prompts), list(params), use_tqdm=False)
    return [(list(output.outputs[0].token_ids), frames_of_output(frames, output)) for output in outputs]


CASES = [
    pytest.param("base", {}, id="base"),
    # A prompt needs several steps, which cut its sounds, and there are too few blocks for eight replies.
    pytest.param("narrow", {"num_gpu_blocks_override": 13, "max_num_batched_tokens": 64}, id="narrow-preempted"),
    pytest.param("asr", {"max_num_batched_tokens": 70}, id="asr-in-chunks", marks=pytest.mark.long),
]


@pytest.mark.parametrize("variant, engine", CASES)
def test_replies_of_a_batch_equal_the_reference(variant, engine, tmp_path, monkeypatch):
    path = build(tmp_path, variant=variant)
    model, codec = LanguageModel(path), AudioTokenizer(path / "audio_tokenizer")
    stop = [model.token_id("<|eostm|>"), model.token_id("<|im_end|>")]
    cases = make_cases(seed=len(variant))
    made = replies_of(path, [(case.prompt, params(MAX_GROUPS, stop)) for case in cases], monkeypatch, **engine)
    for case, (tokens, groups) in zip(cases, made, strict=True):
        reply = model.generate(case.groups(model, codec), MAX_GROUPS, stop).groups
        is_sound = reply.tokens == model.token_id("<|empty|>")
        assert tokens == reply.tokens.tolist(), case.text
        assert groups == reply.codes[is_sound].flatten(1).tolist(), case.text
