"""The talker and its code predictor in vLLM's own loop generate the reference's frames."""

import numpy as np
import pytest
import torch
from vllm import SamplingParams
from vllm.inputs import tokens_input

from tests.e2e.engines import MARKS, engine_here
from tests.model_executor.recorded_frames import frames_of_output, record_frames
from tests.reference.qwen3_tts import Reference, Voice
from tools.reference.qwen3_tts.waves import make_wave
from vllm_omni.messages.stage_step import STAGE_ARGS
from vllm_omni.model_executor.models.qwen3_tts.hf_config import talker_hf_config
from vllm_omni.model_executor.models.qwen3_tts.prompt import ClonedVoice, PromptMaker
from vllm_omni.model_executor.models.qwen3_tts.talker import Qwen3TTSTalker
from vllm_omni.plugin import register
from vllm_omni.testing.qwen3_tts import build

pytestmark = MARKS

TALKER = {
    "hf_overrides": talker_hf_config,
    "worker_cls": "vllm_omni.worker.cpu_worker.CPUARWorker",
    "scheduler_cls": "vllm_omni.core.sched.stream.StreamScheduler",
    "async_scheduling": False,
    "enable_prompt_embeds": True,
    "enable_prefix_caching": False,
    "skip_tokenizer_init": True,
    "generation_config": "vllm",
}
TRANSCRIPT = "One, two, three."
TEXTS = ("Hello there.", "A longer sentence, that is spoken.", "x", "Numbers: 1, 2, 3!")
PENALTY = 1.05


def requests_of(reference: Reference) -> list[dict]:
    """Several texts, each streamed and whole, with what the checkpoint lets one choose."""
    config = reference.config["talker_config"]
    speakers = list(config["spk_id"]) or [None]
    languages = ("auto", "english", "chinese")
    clones = reference.config["tts_model_type"] == "base"
    # The first text is shorter than its recording, the last one longer; every other request has the x-vector alone.
    waves = [torch.from_numpy(make_wave(seconds, seed=1)) for seconds in (3.0, 1.5, 1.2, 1.0) * clones]
    voices = [reference.voice(wave, TRANSCRIPT if index % 2 == 0 else None) for index, wave in enumerate(waves)]
    return [
        {
            "text": text,
            "language": languages[index % 3],
            "speaker": speakers[index % len(speakers)],
            "instruct": "Slowly." if index % 2 else None,
            "streaming": streaming,
            "voice": voices[index] if clones else None,
        }
        for index, text in enumerate(TEXTS)
        for streaming in (True, False)
    ]


def talker_request(reference: Reference, request: dict, max_tokens: int) -> tuple[object, SamplingParams]:
    config = reference.config
    ids = reference.ids(f"<|im_start|>assistant\n{request['text']}<|im_end|>\n<|im_start|>assistant\n")
    reads_instructions = request["instruct"] and config["tts_model_size"] != "0b6"
    instruction = reference.ids(f"<|im_start|>user\n{request['instruct']}<|im_end|>\n") if reads_instructions else ()
    voice: Voice | None = request["voice"]
    cloned, codes = None, None if voice is None else voice.codes
    if voice is not None:
        transcript = reference.ids(f"<|im_start|>assistant\n{voice.text}<|im_end|>\n")[3:-2]
        cloned = ClonedVoice(transcript, len(codes)) if codes is not None else ClonedVoice()
    prompt = PromptMaker(config).make(
        ids[:3],
        ids[3:-5],
        language=request["language"],
        speaker=request["speaker"],
        voice=cloned,
        instruction_ids=instruction,
        is_streamed=request["streaming"],
    )
    params = SamplingParams(
        temperature=0,
        max_tokens=max_tokens,
        min_tokens=2,
        repetition_penalty=PENALTY,
        stop_token_ids=[config["talker_config"]["codec_eos_token_id"]],
        detokenize=False,
        extra_args={
            STAGE_ARGS: {
                "payloads": [],
                **prompt._asdict(),
                "x_vector": voice and voice.x_vector.numpy().tobytes(),
                "voice_codes": None if codes is None else codes.numpy().astype(np.int16).tobytes(),
            }
        },
    )
    return tokens_input([config["talker_config"]["codec_pad_id"]] * len(prompt.text_ids)), params


def frames_of(path, requests: list[tuple], monkeypatch, **engine) -> list[list[list[int]]]:
    """The frames that the talker generates for requests that run together."""
    register()
    frames = record_frames(Qwen3TTSTalker, monkeypatch)
    prompts, params = zip(*requests, strict=True)
    with engine_here(path, **TALKER | engine) as llm:
        outputs = llm.generate(list(prompts), list(params), use_tqdm=False)
    return [frames_of_output(frames, output) for output in outputs]


CASES = [
    pytest.param("base", {}, id="base", marks=pytest.mark.long),
    # A prompt needs several steps, and eight requests more blocks than there are: some are preempted.
    pytest.param("base", {"num_gpu_blocks_override": 9, "max_num_batched_tokens": 16}, id="in-chunks-and-preempted"),
    pytest.param("clone", {"max_num_batched_tokens": 48}, id="clone-in-chunks"),
    pytest.param("small", {}, id="small", marks=pytest.mark.long),
    pytest.param("design", {"num_gpu_blocks_override": 9}, id="design-preempted", marks=pytest.mark.long),
]


@pytest.mark.parametrize("variant, engine", CASES)
def test_frames_of_a_batch_equal_the_reference(variant, engine, tmp_path, monkeypatch):
    path = build(tmp_path, variant=variant)
    reference = Reference(path)
    requests = requests_of(reference)
    spoken = frames_of(path, [talker_request(reference, one, 40) for one in requests], monkeypatch, **engine)
    for request, frames in zip(requests, spoken, strict=True):
        speech = reference.speak(max_tokens=40, repetition_penalty=PENALTY, **request)
        # At the limit, the last sampled code begins a frame that the reference does not complete.
        frames = frames if speech.finished else frames[:-1]
        assert frames == speech.codes.tolist(), (request, float(speech.margins.min()))
