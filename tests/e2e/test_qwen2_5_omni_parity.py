"""Qwen2.5-Omni served through the graph, held against transformers on the same weights and inputs.

Tolerances, all in float32: hidden states 2e-5 absolute; waveforms 1e-5 absolute, against transformers' modules over the
same windows, or over whole utterances where the deployment decodes these; token ids equal, but for a tie (the
reference's two best logits closer than 1e-4), after which a greedy sequence may differ. Ties are counted and printed.
"""

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from prometheus_client import REGISTRY
from vllm import envs
from vllm.config import CompilationMode
from vllm.sampling_params import SamplingParams

from tests import machine
from tests.reference.media import CASES, Case
from tests.reference.qwen2_5_omni import Answer, Reference, Reply
from tests.shared_engines import BLOCK_SIZE, QWEN, Kind, SharedEngines, is_idle, on_the_loop_of
from vllm_omni import OmniLLM
from vllm_omni.engine.stage import StageEngine
from vllm_omni.entrypoints.async_omni import AsyncOmni
from vllm_omni.messages.outputs import OmniRequestOutput
from vllm_omni.model_executor.pipeline import RequestContext, StageRequest
from vllm_omni.relay import StreamReader
from vllm_omni.relay.hub import RelayHub
from vllm_omni.testing import qwen2_5_omni as tiny

HIDDEN_STATE_TOLERANCE = 2e-5
WAVEFORM_TOLERANCE = 1e-5
TIE = 1e-4
MAX_TOKENS, MAX_CODES = 12, 200
FEW_CODES = 60  # where it is not the length that matters
GREEDY = {"temperature": 0.0}

# Each deployment takes another path of the runner: one holds all requests at once; one cuts prompts into chunks and
# compiles its talker; one has room for a few requests only, which it must preempt, has no prefix cache, and a vocoder
# that decodes whole utterances. The dictionaries are the edge to the talker and the vocoder's chunks. The first is the
# engine that other test files share.
DEPLOYMENTS = {
    "base": ((), {}, {}, 0),
    "wide": (
        (
            "thinker.max_num_batched_tokens=1024",
            "talker.max_num_batched_tokens=96",
            "talker.enforce_eager=false",
        ),
        {"transport": "tcp"},
        {"first": 10, "past": 7},
        1,
    ),
    "deep": (
        (
            "thinker.num_gpu_blocks_override=70",
            "talker.num_gpu_blocks_override=70",
            "thinker.enable_prefix_caching=false",
        ),
        {"transport": "shm", "credits": 3},
        {"size": 0},
        2,
    ),
}
CASES_OF = {"base": CASES, "wide": [*CASES[:2], *CASES[2::2]], "deep": [*CASES[:2], *CASES[3::2]]}


class Pair(NamedTuple):
    """The same checkpoint on both sides."""

    llm: OmniLLM
    omni: AsyncOmni
    reference: Reference
    cases: list[Case]
    chunks: dict[str, int]  # of the vocoder
    outputs: list[OmniRequestOutput]

    def max_codes(self, index: int) -> int:
        """How long the speech of a case is: long for the first, and in the long tests for every third."""
        return MAX_CODES if index % (3 if self.chunks else 100) == 0 else FEW_CODES

    def repetition_penalty(self, index: int) -> float:
        """None for every other request of a batch, the model's own for the rest; not the same in each deployment."""
        return (1.0, 1.05)[(index + len(self.chunks)) % 2]

    def vocode(self, codes: list[int], speaker: str) -> torch.Tensor:
        if self.chunks.get("size") == 0:
            return self.reference.vocode(codes, speaker)
        return self.reference.vocode_windows(codes, speaker, **self.chunks)


def start_deployment(name: str, directory: Path) -> OmniLLM:
    stage_overrides, edge, chunks, seed = DEPLOYMENTS[name]
    return OmniLLM(
        tiny.build(directory / "checkpoint", variant=name, seed=seed),
        dtype="float32",
        enforce_eager=True,
        max_model_len=2048,
        block_size=BLOCK_SIZE,
        skip_mm_profiling=True,
        stage_overrides=stage_overrides,
        overrides={"edges": {"thinker->talker": edge, "talker->token2wav": {"chunks": chunks}}},
        log_stats=True,
    )


KINDS = {"base": QWEN, **{name: Kind(name, partial(start_deployment, name), is_idle) for name in ("wide", "deep")}}


class Deployment(NamedTuple):
    name: str
    reference: Reference
    outputs: list[OmniRequestOutput]  # the answers to all cases, once they have been asked for


@pytest.fixture(
    scope="module", params=["base", *(pytest.param(name, marks=pytest.mark.long) for name in ("wide", "deep"))]
)
def deployment(request: pytest.FixtureRequest, shared_engines: SharedEngines) -> Iterator[Deployment]:
    name: str = request.param
    if name == "wide":
        machine.require("g++")  # torch.compile
    yield Deployment(name, Reference(shared_engines.directory(KINDS[name]) / "checkpoint"), [])
    if name != "base":
        shared_engines.stop(KINDS[name])


@pytest.fixture
def pair(deployment: Deployment, engines: SharedEngines) -> Pair:
    name, reference, outputs = deployment
    llm = engines.get(KINDS[name])
    return Pair(llm, llm.engine, reference, CASES_OF[name], DEPLOYMENTS[name][2], outputs)


class PublishedReply(NamedTuple):
    prompt_token_ids: list[int]
    token_ids: list[int]
    rows: torch.Tensor  # [P + N - 1, H], hidden + E(token), media positions without E
    positions: torch.Tensor  # [3, P]


async def think(
    engine: StageEngine, hub: RelayHub, case: Case, max_tokens: int = MAX_TOKENS, *, request_id: str = ""
) -> PublishedReply:
    """What the thinker stage itself publishes for a case: the prompt's rows, and a stream with those of the reply."""
    params = SamplingParams(**GREEDY, max_tokens=max_tokens)
    context = RequestContext(request_id or f"think-{case.name}", {engine.name: params}, {})
    token_ids: list[int] = []
    rows: list[torch.Tensor] = []
    positions = rest = None
    request = StageRequest(case.vllm_prompt, {"readers": ["talker.generate"]})
    async for output in engine.generate(request, context, frozenset({"rows"})):
        token_ids += output.outputs[0].token_ids
        prompt_token_ids = output.prompt_token_ids
        for payload in output.payloads:
            content = hub.pull_blocking(payload)
            if content.get("rows") is not None:
                rows.append(content["rows"].clone())
            if "positions" in content:
                positions = content["positions"].clone()
            for ref in payload.streams.values():
                rest = asyncio.create_task(read_stream(await asyncio.wrap_future(hub.read_stream(ref))))
            for ref in payload.tensors.values():
                hub.release(ref)
    if rest is not None:
        rows += await rest
    assert positions is not None
    return PublishedReply(prompt_token_ids, token_ids, torch.cat(rows), positions)


async def read_stream(stream: StreamReader) -> list[torch.Tensor]:
    """As a consumer that keeps up: a producer without credits is not scheduled."""
    rows = []
    while len(new := await stream.read(timeout_s=60)):
        rows.append(new)
    stream.close()
    return rows


def num_preemptions() -> float:
    """Of the first stage, since it was started: the metric that vLLM exports."""
    samples = (sample for metric in REGISTRY.collect() for sample in metric.samples)
    return sum(sample.value for sample in samples if sample.name == "vllm:num_preemptions_total")


def expected_rows(reference: Reference, reply: Reply) -> torch.Tensor:
    """The reference's hidden states plus embeddings, as the talker reads them: [P + N - 1, H]."""
    inputs, stream = reference.make_talker_inputs(reply, next(iter(reference.model.speaker_map)))
    num_prompt = len(reply.prompt_ids)
    return torch.cat([inputs[:num_prompt], inputs[num_prompt + 1 :], stream[:-2]])


async def answer(
    omni: AsyncOmni, case: Case, *, repetition_penalty: float = 1.0, max_codes: int = MAX_CODES, **kwargs: object
) -> OmniRequestOutput:
    """The whole answer of the graph, merged."""
    params = [
        {**GREEDY, "max_tokens": MAX_TOKENS},
        {**GREEDY, "max_tokens": max_codes, "repetition_penalty": repetition_penalty},
        {"seed": 0},
    ]
    kwargs = {"modalities": ["text", "audio", "codec_ids"], **kwargs}
    outputs = [output async for output in omni.generate(case.vllm_prompt, params, **kwargs)]
    for output in outputs[1:]:
        outputs[0].add(output, aggregate=True)
    return outputs[0]


def num_equal_until_tie(ours: list[int], theirs: list[int], margins: torch.Tensor, what: str) -> int:
    """Assert equality; at a tie of the reference the rest may differ. Returns the number of such ties (0 or 1)."""
    if ours == theirs:
        return 0
    step = next((i for i, pair in enumerate(zip(ours, theirs, strict=False)) if pair[0] != pair[1]), None)
    step = min(len(ours), len(theirs)) if step is None else step
    assert margins[step] < TIE, f"{what}: id {step} differs where the reference's margin is {margins[step]:.2e}"
    return 1


@on_the_loop_of("pair")
async def test_thinker_equals_transformers_in_one_batch(pair: Pair) -> None:
    """Prompt ids, positions, token ids and hidden states, all cases in one batch: text, images, audio, video, mixed."""
    engine, hub = pair.omni.orchestrator.engines["thinker"], pair.omni.orchestrator.hub
    replies = await asyncio.gather(*(think(engine, hub, case) for case in pair.cases))
    num_ties, worst = 0, 0.0
    for case, reply in zip(pair.cases, replies, strict=True):
        expected = pair.reference.think(pair.reference.process(case), MAX_TOKENS)
        assert reply.prompt_token_ids == expected.prompt_ids.tolist(), case.name
        assert torch.equal(reply.positions.long(), expected.positions), case.name
        ties = num_equal_until_tie(reply.token_ids, expected.token_ids, expected.margins, f"{case.name}, reply")
        num_ties += ties
        num_rows = len(expected.prompt_ids) if ties else len(reply.rows)
        rows = expected_rows(pair.reference, expected)
        difference = (reply.rows[:num_rows] - rows[:num_rows]).abs().max().item()
        worst = max(worst, difference)
        assert difference < HIDDEN_STATE_TOLERANCE, f"{case.name}: hidden states differ by {difference:.1e}"
    print(f"thinker: {len(replies)} replies, {num_ties} ties, hidden states within {worst:.1e}")


async def outputs_of(pair: Pair) -> list[OmniRequestOutput]:
    """The answers to all cases in one batch, made once for each deployment."""
    if not pair.outputs:
        pair.outputs[:] = await asyncio.gather(
            *(
                answer(
                    pair.omni,
                    case,
                    repetition_penalty=pair.repetition_penalty(index),
                    max_codes=pair.max_codes(index),
                )
                for index, case in enumerate(pair.cases)
            )
        )
    return pair.outputs


@on_the_loop_of("pair")
async def test_codes_and_waveform_equal_transformers_in_one_batch(pair: Pair) -> None:
    """Greedy codes over up to 200 steps and the waveform from the same noise."""
    outputs = await outputs_of(pair)
    num_ties = num_codes = 0
    worst = 0.0
    speaker = pair.omni.orchestrator.pipeline.validate({})["speaker"]
    for index, (case, output) in enumerate(zip(pair.cases, outputs, strict=True)):
        expected: Answer = pair.reference.answer(
            case,
            max_tokens=MAX_TOKENS,
            max_codes=pair.max_codes(index),
            repetition_penalty=pair.repetition_penalty(index),
            seed=0,
            speaker=speaker,
        )
        assert expected.speech is not None
        codes = output.multimodal_output["codec_ids"]
        ties = num_equal_until_tie(codes, expected.speech.codes, expected.speech.margins, f"{case.name}, codes")
        num_ties += ties
        num_codes += len(codes)
        if ties:
            continue
        audio, waveform = output.multimodal_output["audio"], pair.vocode(codes, speaker)
        assert audio.shape == waveform.shape == (480 * len(codes),)
        difference = (audio - waveform).abs().max().item()
        worst = max(worst, difference)
        assert difference < WAVEFORM_TOLERANCE, f"{case.name}: waveforms differ by {difference:.1e}"
    print(f"talker: {num_codes} codes, {num_ties} ties; waveforms within {worst:.1e}")


def test_the_talker_is_compiled_where_the_deployment_lets_it(pair: Pair) -> None:
    """By torch.compile in vLLM's own way; the other tests hold it to transformers as they do the eager one."""
    config = pair.omni.orchestrator.engines["talker"].vllm_config
    if config.model_config.enforce_eager:
        assert config.compilation_config.mode is CompilationMode.NONE
    else:
        assert config.compilation_config.mode is not CompilationMode.NONE
        assert list(Path(envs.VLLM_CACHE_ROOT, "torch_compile_cache").rglob("*")), "nothing was compiled"


@on_the_loop_of("pair")
async def test_rows_of_preempted_requests_are_published_once(pair: Pair) -> None:
    """Twelve long replies at a time: in the smallest cache, requests lose their blocks and are computed again."""
    engine, hub, case = pair.omni.orchestrator.engines["thinker"], pair.omni.orchestrator.hub, pair.cases[0]
    alone = await think(engine, hub, case, 200)
    preempted_before = num_preemptions()
    replies = await asyncio.gather(*(think(engine, hub, case, 200, request_id=f"reply-{i}") for i in range(12)))
    if engine.vllm_config.cache_config.num_gpu_blocks_override:
        assert num_preemptions() > preempted_before
    for reply in replies:
        assert reply.token_ids == alone.token_ids
        assert reply.rows.shape == alone.rows.shape
        assert (reply.rows - alone.rows).abs().max() < HIDDEN_STATE_TOLERANCE


@on_the_loop_of("pair")
async def test_a_request_alone_answers_as_in_a_batch(pair: Pair) -> None:
    outputs = await outputs_of(pair)
    index = len(pair.cases) - 1
    alone = await answer(
        pair.omni,
        pair.cases[index],
        repetition_penalty=pair.repetition_penalty(index),
        max_codes=pair.max_codes(index),
    )
    assert alone.outputs[0].token_ids == outputs[index].outputs[0].token_ids
    assert alone.multimodal_output["codec_ids"] == outputs[index].multimodal_output["codec_ids"]


@on_the_loop_of("pair")
async def test_every_speaker_equals_transformers(pair: Pair) -> None:
    case = pair.cases[0]
    for speaker in pair.omni.orchestrator.pipeline.speakers:
        expected = pair.reference.answer(case, max_tokens=MAX_TOKENS, max_codes=FEW_CODES, speaker=speaker)
        output = await answer(pair.omni, case, speaker=speaker, max_codes=FEW_CODES)
        assert expected.speech is not None
        assert not num_equal_until_tie(
            output.multimodal_output["codec_ids"], expected.speech.codes, expected.speech.margins, speaker
        )
        difference = (output.multimodal_output["audio"] - pair.vocode(expected.speech.codes, speaker)).abs().max()
        assert difference < WAVEFORM_TOLERANCE


async def speak(omni: AsyncOmni, text: str, repetition_penalty: float = 1.0, **kwargs: object) -> OmniRequestOutput:
    """The whole speech of a given text, merged."""
    params = [None, {**GREEDY, "max_tokens": FEW_CODES, "repetition_penalty": repetition_penalty}, {"seed": 0}]
    outputs = [output async for output in omni.speak(text, params, modalities=["audio", "codec_ids"], **kwargs)]
    for output in outputs[1:]:
        outputs[0].add(output, aggregate=True)
    return outputs[0]


def given_reply(reference: Reference, prompt_token_ids: list[int], text: str) -> Reply:
    """The reply that a thinker would have given, had it said the text (one token a byte) and ended."""
    tokenizer = reference.processor.tokenizer
    num_prompt_tokens = len(prompt_token_ids) - len(text.encode())
    assert bytes(prompt_token_ids[num_prompt_tokens:]) == text.encode()
    ids = torch.tensor(prompt_token_ids)[None]
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "use_audio_in_video": False}
    computed = reference.think(inputs, max_tokens=1)
    token_ids = [*prompt_token_ids[num_prompt_tokens:], tokenizer.convert_tokens_to_ids("<|im_end|>")]
    return replace(computed, prompt_ids=ids[0, :num_prompt_tokens], token_ids=token_ids)


@on_the_loop_of("pair")
async def test_a_given_text_is_spoken_as_if_the_thinker_had_said_it(pair: Pair) -> None:
    """Codes and waveform of transformers' talker and vocoder for that reply, several texts at once."""
    texts = ["!", "Hello, world.", "Say <|im_end|> and <|AUDIO|>.", "Grüße, 世界!", "One two three four five. " * 6]
    speaker = pair.omni.orchestrator.pipeline.speakers[-1]
    how = "Speak slowly."
    spoken = await asyncio.gather(
        *(
            speak(pair.omni, text, pair.repetition_penalty(index), speaker=speaker, instructions=how)
            for index, text in enumerate(texts)
        )
    )
    for index, (text, output) in enumerate(zip(texts, spoken, strict=True)):
        assert not output.outputs
        reply = given_reply(pair.reference, output.prompt_token_ids, text)
        penalty = pair.repetition_penalty(index)
        expected = pair.reference.speak({"use_audio_in_video": False}, reply, FEW_CODES, penalty, speaker)
        codes = output.multimodal_output["codec_ids"]
        if num_equal_until_tie(codes, expected.codes, expected.margins, f"{text!r}, codes"):
            continue
        audio = output.multimodal_output["audio"]
        assert audio.shape == (480 * len(codes),)
        assert (audio - pair.vocode(codes, speaker)).abs().max() < WAVEFORM_TOLERANCE


@on_the_loop_of("pair")
async def test_the_prompt_of_a_given_text_is_the_checkpoints_template(pair: Pair) -> None:
    """A conversation without a system turn, which the template begins with the one that speech needs."""
    output = await speak(pair.omni, "Hello.", instructions="Speak slowly.")
    request = "Speak slowly.\n\nSay the following, word for word, and nothing else:\nHello."
    processor = pair.reference.processor
    prompt = processor.apply_chat_template([{"role": "user", "content": request}], add_generation_prompt=True)
    assert processor.tokenizer.decode(output.prompt_token_ids) == prompt + "Hello."


@on_the_loop_of("pair")
async def test_a_reply_of_one_token_has_text_and_no_sound(pair: Pair) -> None:
    params = {"thinker": {**GREEDY, "max_tokens": 1}}
    outputs = [output async for output in pair.omni.generate(pair.cases[0].vllm_prompt, params)]
    assert [token for output in outputs for one in output.outputs for token in one.token_ids]
    assert [len(output.multimodal_output["audio"]) for output in outputs if output.multimodal_output] == [0]
    assert outputs[-1].finished
    assert "talker" not in outputs[-1].stage_durations


@on_the_loop_of("pair")
async def test_a_reply_of_no_visible_token_has_neither_text_nor_sound(pair: Pair) -> None:
    end = pair.omni.renderer.tokenizer.convert_tokens_to_ids("<|im_end|>")
    params = {"thinker": {**GREEDY, "max_tokens": MAX_TOKENS, "logit_bias": {end: 100.0}}}
    outputs = [output async for output in pair.omni.generate(pair.cases[0].vllm_prompt, params)]
    assert "".join(one.text for output in outputs for one in output.outputs) == ""
    assert sum(len(output.multimodal_output.get("audio", ())) for output in outputs) == 0


@on_the_loop_of("pair")
async def test_speech_after_a_cached_prompt_equals_speech_without(pair: Pair) -> None:
    """Both read the prefix cache: the rows of what is cached were kept."""
    case = pair.cases[1]
    fresh = await answer(pair.omni, case)
    text_only = [await answer(pair.omni, case, modalities=["text"]) for _ in range(2)]
    assert bool(text_only[1].num_cached_tokens) == pair.omni.vllm_config.cache_config.enable_prefix_caching
    assert text_only[1].outputs[0].token_ids == fresh.outputs[0].token_ids
    assert "talker" not in text_only[1].stage_durations
    again = await answer(pair.omni, case)
    assert again.multimodal_output["codec_ids"] == fresh.multimodal_output["codec_ids"]
    assert bool(again.num_cached_tokens) == pair.omni.vllm_config.cache_config.enable_prefix_caching


@on_the_loop_of("pair")
async def test_nothing_is_left_after_all_requests(pair: Pair) -> None:
    statistics = pair.omni.orchestrator.runtime.statistics()
    assert statistics.num_open_calls == statistics.num_running_activations == 0
    assert all(engine.llm.get_num_unfinished_requests() == 0 for engine in pair.omni.orchestrator.engines.values())
