"""The talker and its code predictor in vLLM's own loop generate the reference's frames."""

from pathlib import Path

import pytest
import torch
from vllm import SamplingParams
from vllm.inputs import tokens_input

from tests.e2e.engines import MARKS, engine_here
from tests.model_executor.recorded_frames import frames_of_output, record_frames
from tests.reference.media import CASES
from tests.reference.qwen3_omni import Reference, Reply
from vllm_omni.messages.payload import encode
from vllm_omni.messages.stage_step import STAGE_ARGS
from vllm_omni.model_executor.models.qwen3_omni_moe.layout import make_layout, talker_positions
from vllm_omni.model_executor.models.qwen3_omni_moe.talker import Qwen3OmniTalker, talker_hf_config
from vllm_omni.plugin import register
from vllm_omni.relay.hub import RelayHub, RelayOptions
from vllm_omni.testing.qwen3_omni import build

pytestmark = [
    *MARKS,
    # The talker has no ids for its prompt, so its penalty counts only what it generates, as the library says.
    pytest.mark.filterwarnings("ignore:Passing `repetition_penalty` with `inputs_embeds`:UserWarning"),
]

TALKER = {
    "hf_overrides": talker_hf_config,
    "worker_cls": "vllm_omni.worker.cpu_worker.CPUARWorker",
    "scheduler_cls": "vllm_omni.core.sched.stream.StreamScheduler",
    "async_scheduling": False,
    "enable_prompt_embeds": True,
    "enable_prefix_caching": False,
    "skip_tokenizer_init": True,
    "generation_config": "vllm",
    "max_model_len": 2048,
}
PENALTY = 1.05
SPEAKERS = ("Ethan", "chelsie", "Aiden")
NAMES = ("text", "text2", "image", "audio_short", "video_fps1", "video_audio", "mixed")


def talker_request(reference: Reference, reply: Reply, speaker: str, max_tokens: int) -> tuple[object, SamplingParams]:
    """What the thinker would publish for the reply, and the talker's request for it."""
    config, thinker = reference.config, reference.config.thinker_config
    ids = torch.cat([reply.prompt_ids, torch.tensor(reply.token_ids[:-1])])
    is_media = torch.isin(ids, torch.tensor([thinker.audio_token_id, thinker.image_token_id, thinker.video_token_id]))
    rows = torch.where(is_media[:, None], reply.accepted, reply.embeddings)
    hub = RelayHub(RelayOptions(inline_bytes=1 << 30))
    payload = hub.publish("one", {"rows": rows, "first_row": 0, "num_rows": len(rows), "positions": reply.positions})
    layout = make_layout(reply.prompt_ids.tolist(), config)
    args = {
        "payloads": [encode(payload)],
        "layout": layout._asdict(),
        "speaker_id": config.talker_config.speaker_id[speaker.lower()],
    }
    params = SamplingParams(
        temperature=0,
        max_tokens=max_tokens,
        repetition_penalty=PENALTY,
        stop_token_ids=[config.talker_config.codec_eos_token_id],
        detokenize=False,
        extra_args={STAGE_ARGS: args},
    )
    return tokens_input([config.talker_config.codec_pad_id] * layout.num_prompt_tokens), params


def frames_of(path: Path, requests: list[tuple], monkeypatch: pytest.MonkeyPatch, **engine) -> list[list[list[int]]]:
    """The frames that the talker generates for requests that run together."""
    register()
    frames = record_frames(Qwen3OmniTalker, monkeypatch)
    prompts, params = zip(*requests, strict=True)
    with engine_here(path, **TALKER | engine) as llm:
        outputs = llm.generate(list(prompts), list(params), use_tqdm=False)
    return [frames_of_output(frames, output) for output in outputs]


ALONE = {"max_num_seqs": 1}
# A prompt needs several steps, and the requests more blocks than there are: some are preempted.
TIGHT = {"num_gpu_blocks_override": 26, "max_num_batched_tokens": 64, "max_model_len": 768}
CASES_OF = [
    pytest.param("base", {}, id="base", marks=pytest.mark.long),
    pytest.param("apart", TIGHT, id="apart-in-chunks-and-preempted"),
    pytest.param("eight", {}, id="eight", marks=pytest.mark.long),
    pytest.param("base", ALONE, id="base-one-by-one", marks=pytest.mark.long),
]


@pytest.mark.parametrize("variant, engine", CASES_OF)
def test_frames_of_a_batch_equal_the_reference(variant, engine, tmp_path, monkeypatch):
    path = build(tmp_path, variant=variant)
    reference = Reference(path)
    cases = [one for one in CASES if one.name in NAMES]
    spoken = []
    for index, case in enumerate(cases):
        inputs, speaker = reference.process(case), SPEAKERS[index % len(SPEAKERS)]
        reply = reference.think(inputs, max_tokens=12)
        speech = reference.speak(inputs, reply, 40, PENALTY, speaker)
        spoken.append((case, speech, talker_request(reference, reply, speaker, 40)))
    answers = frames_of(path, [request for *_, request in spoken], monkeypatch, **engine)
    for (case, speech, _), frames in zip(spoken, answers, strict=True):
        # At the limit, the last sampled code begins a frame that the reference does not complete.
        frames = frames if speech.finished else frames[:-1]
        assert frames == speech.codes.tolist(), (case.name, float(speech.margins.min()))


def test_talker_positions_equal_the_reference(tmp_path):
    """Positions of the talker's prompt follow from the thinker's, whatever the media are."""
    reference = Reference(build(tmp_path))
    for case in CASES:
        inputs = reference.process(case)
        reply = reference.think(inputs, max_tokens=3)
        speech = reference.speak(inputs, reply, 2)
        layout = make_layout(reply.prompt_ids.tolist(), reference.config)
        positions = torch.from_numpy(talker_positions(reply.positions.long().numpy(), layout))
        assert torch.equal(positions, speech.prefill_positions.long()), case.name
