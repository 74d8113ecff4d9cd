"""Conversations that are spoken read the prefix cache: answers equal those of an engine that computes every prompt.

Both servers have the same weights. One keeps the rows that the talker reads, and both of its language models have a
small prefix cache, and compute prompts in pieces; the other has none of this. In float32: ids of text and codes are
equal, rows within 2e-5, waveforms within 1e-5.
"""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from prometheus_client import REGISTRY

from tests.e2e.test_kv_pool import damaged
from tests.e2e.test_qwen2_5_omni_parity import PublishedReply, num_preemptions, think
from tests.reference.media import AUDIO, IMAGE, Case, make_audio, make_image
from tests.reference.qwen3_omni import as_qwen3
from vllm_omni import OmniLLM
from vllm_omni.entrypoints.async_omni import AsyncOmni
from vllm_omni.kv.pool.ownership import SLAB_SUFFIX
from vllm_omni.kv.pool.slab_format import HEADER_BYTES
from vllm_omni.testing import qwen2_5_omni, qwen3_omni

pytestmark = [pytest.mark.long, pytest.mark.timeout(400)]

ROW_TOLERANCE = 2e-5
WAVEFORM_TOLERANCE = 1e-5
MAX_TOKENS, MAX_CODES, LONG = 24, 40, 450
BLOCK = 32
ENGINES = {"dtype": "float32", "enforce_eager": True, "max_model_len": 1024, "block_size": BLOCK, "log_stats": True}
SMALL = ("max_num_batched_tokens=128", "num_gpu_blocks_override=50", "max_num_seqs=16")
KEPT = tuple(f"{stage}.{setting}" for stage in ("thinker", "talker") for setting in SMALL)
NOT_KEPT = ("thinker.row_cache=false", "talker.enable_prefix_caching=false")

SYSTEM = "<|im_start|>system\nYou are Qwen, and this turn is long enough for some blocks of the cache.<|im_end|>\n"
TURNS = [f"{AUDIO}What was said?", f"{IMAGE}And what is in this picture?", "Say it again, please, in other words."]
REPLIES = ["It was a sound that rises and falls.", "Waves in many colours."]


def prompt_of_turn(number: int) -> str:
    """The prompt of a turn, from 0: it begins with that of the turn before."""
    prompt = SYSTEM
    for turn, reply in zip(TURNS, REPLIES, strict=False):
        if number == 0:
            break
        number -= 1
        prompt += f"<|im_start|>user\n{turn}<|im_end|>\n<|im_start|>assistant\n{reply}<|im_end|>\n"
    turn = TURNS[prompt.count("<|im_start|>user")]
    return f"{prompt}<|im_start|>user\n{turn}<|im_end|>\n<|im_start|>assistant\n"


def turns_of(seed: int) -> list[Case]:
    """A conversation; others differ in what is heard and seen, and not in a single id."""
    audio, image = make_audio(2.0, seed=seed), make_image(112, 84, seed=seed)
    media = [{"audios": (audio,)}, *[{"audios": (audio,), "images": (image,)}] * 2]
    return [Case(f"turn {i} of {seed}", prompt_of_turn(i), **media[i]) for i in range(len(TURNS))]


class Answer(NamedTuple):
    token_ids: list[int]
    codes: Any
    audio: torch.Tensor
    num_cached: int


class Model(NamedTuple):
    build: Callable[[Path], Path]
    as_case: Callable[[Case], Case]
    vocoder_params: dict[str, Any]


MODELS = {
    "qwen2.5": Model(lambda path: Path(qwen2_5_omni.build(path)), lambda case: case, {"token2wav": {"seed": 0}}),
    "qwen3": Model(lambda path: Path(qwen3_omni.build(path)), as_qwen3, {}),
}


class Side:
    """One engine of the two."""

    def __init__(self, llm: OmniLLM, model: Model) -> None:
        self.llm, self.model = llm, model

    def rows(self, cases: Sequence[Case], max_tokens: int = MAX_TOKENS) -> list[PublishedReply]:
        """What the thinker publishes for requests at the same time."""

        async def run(omni: AsyncOmni) -> list[PublishedReply]:
            engine, hub = omni.orchestrator.engines["thinker"], omni.orchestrator.hub
            return list(
                await asyncio.gather(
                    *(
                        think(engine, hub, self.model.as_case(case), max_tokens, request_id=f"{index}-{case.name}")
                        for index, case in enumerate(cases)
                    )
                )
            )

        return self.llm.run(run(self.llm.engine))

    def answers(
        self, cases: Sequence[Case], modalities: Sequence[str] = ("text", "audio"), **options: Any
    ) -> list[Answer]:
        """Spoken answers to requests at the same time."""

        async def run() -> list[Answer]:
            return list(await asyncio.gather(*(self._answer(case, list(modalities), **options) for case in cases)))

        return self.llm.run(run())

    def one_by_one(self, cases: Sequence[Case], modalities: Sequence[str] = ("text", "audio")) -> list[Answer]:
        return [answer for case in cases for answer in self.answers([case], modalities)]

    async def _answer(self, case: Case, modalities: list[str], **options: Any) -> Answer:
        wanted = [*modalities, "codec_ids"] if "audio" in modalities else modalities
        outputs = [one async for one in self.stream(case, wanted, **options)]
        for output in outputs[1:]:
            outputs[0].add(output, aggregate=True)
        (merged, *_) = outputs
        media = merged.multimodal_output
        codes, audio = media.get("codec_ids"), media.get("audio", torch.empty(0))
        cached = max(one.num_cached_tokens or 0 for one in outputs)
        return Answer(list(merged.outputs[0].token_ids), codes, audio, cached)

    def stream(
        self,
        case: Case,
        modalities: list[str],
        salt: str | None = None,
        max_codes: int = MAX_CODES,
        min_codes: int = 0,
        **options: Any,
    ) -> Any:
        params = {
            "thinker": {"temperature": 0.0, "max_tokens": MAX_TOKENS, "ignore_eos": True},
            "talker": {"temperature": 0.0, "max_tokens": max_codes, "min_tokens": min_codes},
            **self.model.vocoder_params,
        }
        prompt = dict(self.model.as_case(case).vllm_prompt) | ({} if salt is None else {"cache_salt": salt})
        return self.llm.engine.generate(prompt, params, modalities=modalities, **options)

    def leave(self, case: Case) -> None:
        """Ask, and leave with the first output."""

        async def run() -> None:
            stream = self.stream(case, ["text", "audio"])
            async for _ in stream:
                break
            await stream.aclose()

        self.llm.run(run())


class Sides(NamedTuple):
    kept: Side
    computed: Side


@pytest.fixture(scope="module", params=MODELS)
def sides(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sides]:
    model = MODELS[request.param]
    path = model.build(tmp_path_factory.mktemp("checkpoint") / "model")
    with (
        OmniLLM(path, skip_mm_profiling=True, stage_overrides=KEPT, **ENGINES) as kept,
        OmniLLM(path, skip_mm_profiling=True, stage_overrides=NOT_KEPT, **ENGINES) as computed,
    ):
        yield Sides(Side(kept, model), Side(computed, model))


def assert_equal(answers: Sequence[Answer], expected: Sequence[Answer]) -> None:
    for ours, theirs in zip(answers, expected, strict=True):
        assert ours.token_ids == theirs.token_ids
        assert ours.codes == theirs.codes
        assert ours.audio.shape == theirs.audio.shape and len(ours.audio)
        assert (ours.audio - theirs.audio).abs().max() < WAVEFORM_TOLERANCE


def cached_rows() -> float:
    """Rows published for tokens of the prefix cache, since the engines were started: the metric."""
    samples = (sample for metric in REGISTRY.collect() for sample in metric.samples)
    return sum(sample.value for sample in samples if sample.name == "vllm_omni:cached_rows_total")


def talker_metric(name: str) -> float:
    """Of the talkers; without a prefix cache, one counts neither queries nor hits."""
    samples = (sample for metric in REGISTRY.collect() for sample in metric.samples)
    return sum(sample.value for sample in samples if sample.name == name and sample.labels.get("stage") == "talker")


def talker_hits() -> float:
    """Tokens of prompts that the talker has found in its prefix cache."""
    return talker_metric("vllm:prefix_cache_hits_total")


def test_later_turns_read_the_cache_and_sound_the_same(sides: Sides) -> None:
    before, talker_before = cached_rows(), talker_hits()
    answers, expected = (side.one_by_one(turns_of(1)) for side in sides)
    assert_equal(answers, expected)
    assert [answer.num_cached for answer in expected] == [0, 0, 0]
    assert answers[0].num_cached == 0
    assert 0 < answers[1].num_cached < answers[2].num_cached
    assert cached_rows() - before == sum(answer.num_cached for answer in answers)
    # The talker of Qwen3-Omni reads the user's turns alone.
    assert talker_hits() - talker_before >= 2 * BLOCK


def test_the_talker_finds_the_whole_prompt_of_the_turn_before(sides: Sides) -> None:
    first, second, _ = turns_of(21)
    sides.kept.one_by_one([first])
    for case in (first, second):
        before = talker_hits()
        (answer,) = sides.kept.answers([case])
        assert_equal([answer], sides.computed.answers([case]))
        assert talker_hits() - before >= BLOCK


def test_another_voice_reads_the_conversation_and_not_the_voice(sides: Sides) -> None:
    (turn, *_) = turns_of(22)
    speakers = list(sides.kept.llm.engine.orchestrator.pipeline.speakers)[:2]
    answers = []
    for speaker in (*speakers, speakers[0]):
        answers += sides.kept.answers([turn], speaker=speaker)
        assert_equal(answers[-1:], sides.computed.answers([turn], speaker=speaker))
    assert answers[0].codes == answers[2].codes != answers[1].codes


def test_the_talker_shares_nothing_between_salts(sides: Sides) -> None:
    (turn, *_) = turns_of(23)
    expected = sides.computed.answers([turn])
    for salt, is_found in (("one", False), ("two", False), ("one", True)):
        before = talker_hits()
        assert_equal(sides.kept.answers([turn], salt=salt), expected)
        assert (talker_hits() > before) == is_found


def test_preempted_talkers_speak_the_same(sides: Sides) -> None:
    """Two fill the cache: others lose their blocks, however late they begin, and some of these are found again."""
    cases = [case for seed in range(24, 26) for case in turns_of(seed)[1:]]
    before = talker_metric("vllm:num_preemptions_total")
    answers = sides.kept.answers(cases, max_codes=LONG, min_codes=LONG)
    assert talker_metric("vllm:num_preemptions_total") > before
    assert_equal(answers, sides.computed.answers(cases, max_codes=LONG, min_codes=LONG))


def test_rows_of_a_cached_prefix_are_those_that_were_computed(sides: Sides) -> None:
    """Prompts and replies, by themselves, at once, and a second time; each conversation with its own media."""
    cases = [case for seed in (2, 3) for case in turns_of(seed)]
    expected = sides.computed.rows(cases)
    for replies in (sides.kept.rows(cases), sides.kept.rows(cases), sides.kept.rows(cases[::-1])[::-1]):
        for reply, other in zip(replies, expected, strict=True):
            assert reply.token_ids == other.token_ids
            assert torch.equal(reply.positions, other.positions)
            assert reply.rows.shape == other.rows.shape
            assert (reply.rows - other.rows).abs().max() < ROW_TOLERANCE
    assert not torch.equal(expected[0].rows, expected[3].rows)  # the same ids, and other media


def test_a_prefix_that_was_answered_in_text_is_spoken(sides: Sides) -> None:
    turns = turns_of(4)
    (text,) = sides.kept.answers(turns[1:2], ["text"])
    (spoken,), expected = sides.kept.answers(turns[2:]), sides.computed.answers(turns[2:])
    assert_equal([spoken], expected)
    assert not text.num_cached < 0 < spoken.num_cached


def test_a_turn_whose_request_was_aborted_is_asked_again(sides: Sides) -> None:
    turns = turns_of(5)
    sides.kept.leave(turns[1])
    assert_equal(sides.kept.one_by_one(turns[1:]), sides.computed.one_by_one(turns[1:]))


def test_preempted_requests_publish_each_row_once(sides: Sides) -> None:
    """Two fill the cache: others lose their blocks, however late they begin, and some of these are found again."""
    cases = [case for seed in range(6, 9) for case in turns_of(seed)[1:]]
    before = num_preemptions()
    replies = sides.kept.rows(cases, LONG)
    assert num_preemptions() > before
    for reply, other in zip(replies, sides.computed.rows(cases, LONG), strict=True):
        assert reply.token_ids == other.token_ids
        assert reply.rows.shape == other.rows.shape
        assert (reply.rows - other.rows).abs().max() < ROW_TOLERANCE


@pytest.mark.parametrize(("name", "num_ranks"), [("qwen2.5", 2), ("qwen3", 1)])
def test_the_next_engine_speaks_from_the_pages_of_a_pool(name: str, num_ranks: int, tmp_path: Path) -> None:
    """They have the rows that the talker reads, also those of answers in text; damaged ones are computed."""
    model, turns, others = MODELS[name], turns_of(1), turns_of(2)
    kept = (*KEPT, f"thinker.tensor_parallel_size={num_ranks}")
    path = model.build(tmp_path / "model")
    slabs = tmp_path / "slabs"
    pool = {"memory_bytes": 32 << 20, "staging_bytes": 8 << 20, "directory": str(slabs)}

    def start(**more: Any) -> OmniLLM:
        return OmniLLM(path, skip_mm_profiling=True, **ENGINES, **more)

    with start(stage_overrides=NOT_KEPT) as llm:
        expected = Side(llm, model).one_by_one([*turns, others[1]])
    with start(stage_overrides=kept, kv_pool=pool) as llm:
        engine = Side(llm, model)
        assert_equal(engine.one_by_one(turns[:2]), expected[:2])
        engine.answers(others[:1], ["text"])
    with start(stage_overrides=kept, kv_pool=pool) as llm:
        engine, before = Side(llm, model), cached_rows()
        answers = engine.answers([turns[2], others[1]])
        assert_equal(answers, expected[2:])
        assert min(answer.num_cached for answer in answers) >= 3 * BLOCK
        assert cached_rows() - before == sum(answer.num_cached for answer in answers)
    for slab in slabs.glob(f"*{SLAB_SUFFIX}"):
        damaged(slab, HEADER_BYTES + (64 << 10))
    with start(stage_overrides=kept, kv_pool=pool) as llm:
        assert_equal(Side(llm, model).answers([turns[2]]), [expected[2]])
