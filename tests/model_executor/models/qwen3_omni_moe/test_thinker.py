"""The thinker in vLLM's own loop computes the reference's hidden states, and the rows that the talker reads.

Not compared: two videos at 4 frames per second. The reference gives their frames positions between two integers, which
vLLM truncates, as all of its rotary tables have a row for each integer. And of two audios in one prompt neither is
shorter than a second here: the reference pads such a one to the other, and its convolutions see the padding.
"""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from vllm import SamplingParams

from tests.e2e.engines import MARKS, engine_here
from tests.reference.media import CASES, Case, make_audio
from tests.reference.qwen3_omni import Reference, Reply, as_qwen3
from vllm_omni.plugin import register
from vllm_omni.testing.qwen3_omni import build
from vllm_omni.worker.ar_runner import ARModelRunner

pytestmark = MARKS

TOLERANCE = 2e-5
THINKER = {
    "hf_overrides": {"architectures": ["Qwen3OmniThinker"]},
    "worker_cls": "vllm_omni.worker.cpu_worker.CPUARWorker",
    "scheduler_cls": "vllm_omni.core.sched.stream.StreamScheduler",
    "async_scheduling": False,
    "enable_prefix_caching": False,
    "limit_mm_per_prompt": {"image": 4, "audio": 4, "video": 2},
    "skip_mm_profiling": True,
    "max_model_len": 2048,
}
FRACTIONAL = ("video_fps4", "video_audio_fps4")
NUM_TOKENS = 12


class Computed(NamedTuple):
    token_ids: list[int]
    prompt_ids: list[int]
    positions: torch.Tensor  # [3, P]
    hidden_states: torch.Tensor  # [P + N - 1, H]
    rows: torch.Tensor  # [P + N - 1, H]


def with_longer_audio(case: Case) -> Case:
    return replace(case, audios=(case.audios[0], make_audio(1.5, seed=4))) if len(case.audios) > 1 else case


def prompt_of(case: Case) -> dict[str, object]:
    """The argument of ``LLM.generate``; the time between frames follows from ``fps``."""
    prompt = as_qwen3(case).vllm_prompt
    kwargs = {name: value for name, value in case.mm_processor_kwargs.items() if name != "second_per_grid_ts"}
    return {**prompt, "mm_processor_kwargs": kwargs} if kwargs else prompt


def compute(path: Path, cases: Iterable[Case], monkeypatch: pytest.MonkeyPatch, **engine: object) -> list[Computed]:
    """What the thinker computes for requests that run together."""
    register()
    hidden_states, rows, positions = defaultdict(list), defaultdict(list), {}

    def recorded(self: ARModelRunner) -> dict:
        state = self.execute_model_state
        if state is None:
            return {}
        finished, offset = self.rows.finish(state), 0
        for request_id in self.input_batch.req_ids:
            num_tokens = state.scheduler_output.num_scheduled_tokens[request_id]
            name = request_id.partition("-")[0]
            hidden_states[name].append(state.hidden_states[offset : offset + num_tokens].clone())
            rows[name].append(finished[offset : offset + num_tokens])
            positions[name] = self.requests[request_id].mrope_positions
            offset += num_tokens
        return {}

    monkeypatch.setattr(ARModelRunner, "_publish_rows", recorded)
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS)
    with engine_here(path, **THINKER | engine) as llm:
        outputs = llm.generate([prompt_of(case) for case in cases], params, use_tqdm=False)
    names = [output.request_id.partition("-")[0] for output in outputs]
    return [
        Computed(
            list(output.outputs[0].token_ids),
            list(output.prompt_token_ids),
            positions[name][:, : len(output.prompt_token_ids)],
            torch.cat(hidden_states[name]),
            torch.cat(rows[name]),
        )
        for output, name in zip(outputs, names, strict=True)
    ]


def expected_rows(reference: Reference, reply: Reply) -> torch.Tensor:
    """What the talker reads: [P + N - 1, H]."""
    thinker = reference.config.thinker_config
    ids = torch.cat([reply.prompt_ids, torch.tensor(reply.token_ids[:-1], dtype=torch.long)])
    is_media = torch.isin(ids, torch.tensor([thinker.audio_token_id, thinker.image_token_id, thinker.video_token_id]))
    return torch.where(is_media[:, None], reply.accepted, reply.embeddings)


CONFIGURATIONS = [
    pytest.param("base", {}, id="base"),
    pytest.param("apart", {"max_num_batched_tokens": 1024}, id="apart-in-chunks", marks=pytest.mark.long),
    pytest.param("eight", {"max_num_seqs": 3}, id="eight", marks=pytest.mark.long),
]


@pytest.mark.parametrize("variant, engine", CONFIGURATIONS)
def test_a_batch_equals_the_reference(variant, engine, tmp_path, monkeypatch):
    path = build(tmp_path, variant=variant)
    reference = Reference(path)
    cases = [with_longer_audio(case) for case in CASES if case.name not in FRACTIONAL]
    worst = 0.0
    for case, ours in zip(cases, compute(path, cases, monkeypatch, **engine), strict=True):
        expected = reference.think(reference.process(case), NUM_TOKENS)
        assert ours.prompt_ids == expected.prompt_ids.tolist(), case.name
        assert torch.equal(ours.positions.long(), expected.positions.long()), case.name
        assert ours.token_ids == expected.token_ids, (case.name, float(expected.margins.min()))
        for what, mine, theirs in (
            ("hidden states", ours.hidden_states, expected.hidden_states),
            ("rows", ours.rows, expected_rows(reference, expected)),
        ):
            difference = float((mine - theirs).abs().max())
            worst = max(worst, difference)
            assert difference < TOLERANCE, f"{case.name}: {what} differ by {difference:.1e}"
    print(f"{len(cases)} cases within {worst:.1e}")
