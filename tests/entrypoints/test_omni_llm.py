"""``OmniLLM`` and the ``AsyncOmni`` behind it, with real engines on a tiny checkpoint."""

import asyncio
import shutil
from contextlib import aclosing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import torch
from PIL import Image
from vllm.sampling_params import SamplingParams

from tests.encoded_link import served_from_bytes
from tests.reference.media import AUDIO, IMAGE, VIDEO, format_prompt, make_image, make_video
from tests.shared_engines import BLOCK_SIZE, QWEN, SharedEngines
from tests.shared_engines import QWEN_MAX_MODEL_LEN as MAX_MODEL_LEN
from vllm_omni import AsyncOmni, Omni, OmniLLM
from vllm_omni.deploy.inventory import this_host
from vllm_omni.deploy.needs import stages_of
from vllm_omni.deploy.placement import plan
from vllm_omni.engine.orchestrator import Orchestrator
from vllm_omni.errors import CallAborted, ConfigError, DeadlineExceeded, InvalidRequest, StageFailed, Unavailable
from vllm_omni.messages.payload import Payload, TensorRef, encode
from vllm_omni.model_executor.omni_thinker import max_video_positions
from vllm_omni.model_executor.pipeline import RequestContext, StageRequest
from vllm_omni.process.memory_division import MEMORY, MemoryDivision

PROMPT = format_prompt("Hello, who are you?")
SHORT = {"thinker": {"temperature": 0.0, "max_tokens": 8}, "talker": {"temperature": 0.0, "max_tokens": 20}}


@pytest.fixture
def omni(engines: SharedEngines) -> OmniLLM:
    return engines.get(QWEN)


def generate(omni: OmniLLM, prompts: Any = PROMPT, **kwargs: Any) -> Any:
    kwargs = {"sampling_params_list": SHORT, "use_tqdm": False, **kwargs}
    return omni.generate(prompts, **kwargs)


def test_text_and_speech_by_default(omni: OmniLLM, tmp_path: Path) -> None:
    (output,) = generate(omni)
    assert len(output.outputs[0].token_ids) == 8
    assert output.outputs[0].text
    assert output.outputs[0].finish_reason == "length"
    assert output.finished
    assert set(output.multimodal_output) == {"audio", "sample_rate"}
    audio = output.multimodal_output["audio"]
    assert audio.dtype == torch.float32
    assert audio.shape == (20 * 480,)
    assert 0.001 < audio.abs().max() <= 1.0
    samples, sample_rate = soundfile.read(output.save_audio(tmp_path / "speech.wav"), dtype="float32")
    assert sample_rate == output.multimodal_output["sample_rate"] == 24000
    assert abs(samples - audio.numpy()).max() < 1e-4  # 16 bits


def test_the_stages_divide_the_memory_as_it_was_planned(omni: OmniLLM) -> None:
    engines = omni.engine.orchestrator.engines
    config = omni.engine.config
    (planned,) = plan(stages_of(config, Orchestrator(config)), [this_host()]).memory().values()
    tether = engines["talker"].vllm_config.additional_config
    divided = MemoryDivision(tether.directory, "cpu", tether[MEMORY]["ranks"]["cpu"]).plan()
    assert divided is not None
    for one, real in zip(planned.stages, divided.stages, strict=True):
        assert (one.stage, one.cache_min, one.cache_max) == (real.stage, real.cache_min, real.cache_max)
    vocoders = [one.stages[-1] for one in (planned, divided)]  # in the other engines, vLLM repacks the weights
    assert vocoders[0].weights == vocoders[1].weights > 0
    assert divided.caches.keys() == {"thinker", "talker"}
    for stage in divided.stages[:-1]:
        blocks = engines[stage.stage].llm.vllm_config.cache_config.num_gpu_blocks
        request = (stage.cache_max - stage.cache_min) / (stage.max_num_seqs - 1)
        bytes_per_block = request / (MAX_MODEL_LEN / BLOCK_SIZE)
        assert stage.cache_min <= divided.caches[stage.stage] <= stage.cache_max
        assert blocks == divided.caches[stage.stage] // bytes_per_block


def test_stage_durations_name_every_stage_that_ran(omni: OmniLLM) -> None:
    (output,) = generate(omni)
    assert set(output.stage_durations) == {"thinker", "talker", "token2wav", "total"}
    assert all(0 < seconds <= output.stage_durations["total"] for seconds in output.stage_durations.values())


def test_a_text_answer_never_starts_the_talker(omni: OmniLLM) -> None:
    (output,) = generate(omni, modalities=["text"])
    assert set(output.stage_durations) == {"thinker", "total"}
    assert output.multimodal_output == {}


def test_codec_ids_come_when_asked_for(omni: OmniLLM) -> None:
    (output,) = generate(omni, modalities=["audio", "codec_ids"])
    assert len(output.multimodal_output["codec_ids"]) == 20
    assert len(output.multimodal_output["audio"]) == 20 * 480


def test_parameters_by_position_are_those_by_name(omni: OmniLLM) -> None:
    by_name = generate(omni, modalities=["codec_ids"])
    by_position = generate(omni, modalities=["codec_ids"], sampling_params_list=[SHORT["thinker"], SHORT["talker"]])
    assert by_name[0].outputs[0].token_ids == by_position[0].outputs[0].token_ids
    assert by_name[0].multimodal_output == by_position[0].multimodal_output


def test_parameters_of_the_first_stage_need_no_name(omni: OmniLLM) -> None:
    (output,) = generate(omni, modalities=["text"], sampling_params_list={"max_tokens": 3, "temperature": 0.0})
    assert len(output.outputs[0].token_ids) == 3


def test_the_seed_of_the_vocoder_seeds_its_noise(omni: OmniLLM) -> None:
    def waveform(seed: int | None) -> torch.Tensor:
        params = SHORT | {"token2wav": {"seed": seed}}
        return generate(omni, sampling_params_list=params)[0].multimodal_output["audio"]

    assert torch.equal(waveform(5), waveform(5))
    assert not torch.equal(waveform(5), waveform(6))
    assert not torch.equal(waveform(None), waveform(None))


def test_outputs_come_in_the_order_of_the_prompts(omni: OmniLLM) -> None:
    prompts = [format_prompt(text) for text in ("one", "two, three", "four")]
    outputs = generate(omni, prompts, modalities=["text"])
    assert [output.prompt for output in outputs] == prompts


def test_a_conversation_is_the_prompt_that_its_template_makes(omni: OmniLLM) -> None:
    messages = [{"role": "system", "content": "You are Qwen."}, {"role": "user", "content": "Hello, who are you?"}]
    (chat,) = omni.chat(messages, SHORT, ["codec_ids"], use_tqdm=False)
    (prompt,) = generate(omni, modalities=["codec_ids"])
    assert chat.prompt_token_ids == prompt.prompt_token_ids
    assert chat.multimodal_output == prompt.multimodal_output


def codes_of(omni: OmniLLM, **talker: Any) -> list[int]:
    params = {**SHORT, "talker": {**SHORT["talker"], **talker}}
    (output,) = generate(omni, modalities=["codec_ids"], sampling_params_list=params)
    codes: list[int] = output.multimodal_output["codec_ids"]
    return codes


def test_a_stop_id_of_the_talker_ends_the_speech_before_that_code(omni: OmniLLM) -> None:
    codes = codes_of(omni)
    stop = next(code for place, code in enumerate(codes) if place > 4 and code not in codes[:place])
    place = codes.index(stop)
    assert codes_of(omni, stop_token_ids=[stop]) == codes[:place]
    later = codes_of(omni, stop_token_ids=[stop], min_tokens=place + 2)
    assert later[:place] == codes[:place] and len(later) > place + 1


def test_the_talker_has_no_end_ids_of_the_text(omni: OmniLLM) -> None:
    talker = omni.engine.orchestrator.front("talker").llm
    assert talker.model_config.try_get_generation_config()["eos_token_id"]  # upstream's source of stop ids
    assert talker.input_processor.generation_config_fields == {}
    assert codes_of(omni, min_tokens=5)[:5] == codes_of(omni)[:5]


@pytest.mark.parametrize("sample_rate", [8000, 24000, 44100])
def test_sound_of_another_rate_is_heard_as_long_as_it_is(omni: OmniLLM, sample_rate: int) -> None:
    def num_prompt_tokens(rate: int) -> int:
        sound = np.sin(np.arange(2 * rate) * 440 * 2 * np.pi / rate).astype(np.float32)
        prompt = {"prompt": format_prompt(AUDIO), "multi_modal_data": {"audio": (sound, rate)}}
        return len(generate(omni, prompt, modalities=["text"])[0].prompt_token_ids)

    assert num_prompt_tokens(sample_rate) == num_prompt_tokens(16000)


@pytest.mark.parametrize("kind", [tuple, iter], ids=["tuple", "iterator"])
def test_prompts_may_be_any_sequence(omni: OmniLLM, kind: Any) -> None:
    assert len(generate(omni, kind([PROMPT, PROMPT]), modalities=["text"], priority=0)) == 2


def test_speakers_differ(omni: OmniLLM) -> None:
    spoken = [generate(omni, modalities=["codec_ids"], speaker=name)[0] for name in ("Chelsie", "Ethan")]
    assert spoken[0].multimodal_output != spoken[1].multimodal_output


def test_texts_are_spoken_in_their_order(omni: OmniLLM) -> None:
    params = {"talker": SHORT["talker"]}
    texts = ["One.", "Two, three."]
    together = omni.speak(texts, params, modalities=["audio", "codec_ids"])
    assert [len(output.multimodal_output["audio"]) for output in together] == [20 * 480] * 2
    assert all(output.finished and not output.outputs for output in together)
    alone = [omni.speak(text, params, modalities=["codec_ids"])[0] for text in texts]
    codes = [output.multimodal_output["codec_ids"] for output in together]
    assert codes == [output.multimodal_output["codec_ids"] for output in alone]
    assert codes[0] != codes[1]
    assert set(together[0].stage_durations) == {"thinker", "talker", "token2wav", "total"}


@pytest.mark.parametrize(
    ("text", "arguments", "message"),
    [
        ("", {}, "empty"),
        ("Hello.", {"speaker": "Ethen"}, "did you mean 'Ethan'"),
        ("Hello.", {"modalities": ["text", "audio"]}, "no text output"),
        (
            "Hello.",
            {"sampling_params_list": {"max_tokens": 5}},
            "stage 'thinker': sampling parameters have no effect: the text is fixed",
        ),
        ("x" * MAX_MODEL_LEN, {}, f"{MAX_MODEL_LEN - 2}"),
    ],
)
def test_a_text_that_cannot_be_spoken_is_rejected(
    omni: OmniLLM, text: str, arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidRequest, match=message):
        omni.speak(text, **arguments)


def test_a_model_without_text_to_speech_rejects_it(omni: OmniLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(omni.engine.orchestrator.pipeline, "speech_stage", None)
    with pytest.raises(InvalidRequest, match=r"this model \(qwen2_5_omni\) does not support text to speech"):
        omni.speak("Hello.")


def test_media_that_the_engine_does_not_have_are_sent_with_the_next_try(omni: OmniLLM) -> None:
    prompt = {"prompt": format_prompt(IMAGE), "multi_modal_data": {"image": make_image(56, 84)}}
    (before,) = generate(omni, prompt, modalities=["text"])
    # As when both processes evict in different orders: the front end takes them for sent.
    thinker = omni.engine.orchestrator.engines["thinker"]
    omni.run(thinker.ask(thinker.llm.engine_core.reset_mm_cache_async()))
    with pytest.raises(Unavailable, match=r"stage 'thinker': .*send the request again"):
        generate(omni, prompt, modalities=["text"])
    (after,) = generate(omni, prompt, modalities=["text"])
    assert after.outputs[0].token_ids == before.outputs[0].token_ids


def broken_media() -> dict[str, dict[str, Any]]:
    image = {"prompt": format_prompt(IMAGE), "multi_modal_data": {"image": "not an image"}}
    empty_image = {"prompt": format_prompt(IMAGE), "multi_modal_data": {"image": Image.new("RGB", (0, 0))}}
    silence = {"prompt": format_prompt(AUDIO), "multi_modal_data": {"audio": (np.zeros(0, np.float32), 16000)}}
    missing = {"prompt": format_prompt("no placeholder"), "multi_modal_data": {"image": make_image(56, 56)}}
    noise = np.full(16000, np.nan, np.float32)
    not_a_number = {"prompt": format_prompt(AUDIO), "multi_modal_data": {"audio": (noise, 16000)}}
    return {
        "not a number": not_a_number,
        "image": image,
        "empty image": empty_image,
        "silence": silence,
        "missing": missing,
    }


def mistyped() -> SamplingParams:
    params = SamplingParams()
    params.top_k = 1.5  # type: ignore[assignment]
    return params


def video_at(fps: float, **more: Any) -> dict[str, Any]:
    prompt = {"prompt": format_prompt(VIDEO), "multi_modal_data": {"video": [make_video(4, 56, 56)]}}
    return prompt | {"mm_processor_kwargs": {"fps": fps, **more}}


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "modality": ({"modalities": ["text", "smell"]}, "'smell'.*valid: .*audio"),
    "no modality": ({"modalities": []}, "no modality"),
    "speaker": ({"speaker": "Ethen"}, "'Ethen'.*did you mean 'Ethan'"),
    "stage": ({"sampling_params_list": {"talkr": {}}}, "'talkr'.*did you mean 'talker'"),
    "parameter": ({"sampling_params_list": {"talker": {"temprature": 1}}}, "temprature = 1: .*mean 'temperature'"),
    "value": ({"sampling_params_list": {"talker": {"temperature": -1.0}}}, "temperature"),
    "too many": ({"sampling_params_list": [{}, {}, {}, {}]}, "4 sets"),
    "priority": ({"priority": [1, 2]}, "2 values of priority for 1 prompts"),
    "several answers": ({"sampling_params_list": {"thinker": {"n": 2}}}, "'thinker': n = 2.*give n = 1"),
    "priority type": ({"priority": [1.5]}, "priority = 1.5"),
    "priority range": ({"priority": [2**63]}, "priority = 9223372036854775808"),
    "modalities type": ({"modalities": 5}, "modalities = 5"),
    "ids that are no ints": ({"prompts": {"prompt_token_ids": [72, True]}}, "True is not an int"),
    "a prompt of a type that none has": ({"prompts": {"type": "text", "text": "Hello"}}, "type 'text' is none of"),
    "a rendered prompt without ids": (
        {"prompts": {"type": "token", "prompt": "Hello"}},
        "'token' has prompt_token_ids",
    ),
    "a salt that is no text": (
        {"prompts": {"prompt": PROMPT, "cache_salt": 5}},
        "'thinker': cache_salt: Expected `str",
    ),
    "a params object of wrong types": ({"sampling_params_list": [SamplingParams(max_tokens=4), mistyped()]}, "talker"),
    "several answers of the talker": ({"sampling_params_list": {"talker": {"n": 2}}}, "'talker': n = 2"),
    "seed": ({"sampling_params_list": {"talker": {"seed": 2**70}}}, r"'talker': seed = \d+: valid"),
    "a stop id that is no code": (
        {"sampling_params_list": {"talker": {"stop_token_ids": [100_000]}}},
        r"'talker': .*\[100000\] in stop_token_ids .*Vocabulary size: \d{3} ",
    ),
    "a text that ends speech": ({"sampling_params_list": {"talker": {"stop": ["a"]}}}, "'talker': stop: .*not text"),
    "a text that ends sound": (
        {"sampling_params_list": {"token2wav": {"stop": ["a"]}}},
        "stop: it generates no tokens",
    ),
    "tokens of sound": (
        {"sampling_params_list": {"token2wav": {"min_tokens": 2}}},
        "min_tokens: it generates no tokens",
    ),
    "a frame in hours": ({"prompts": video_at(1e-6)}, "higher fps"),
    "frames backwards": ({"prompts": video_at(-1.0)}, "fps"),
    "frames at once": ({"prompts": video_at(float("inf"))}, ""),
    "frames at no time": ({"prompts": video_at(float("nan"))}, ""),
    "length": ({"prompts": "x" * 2 * MAX_MODEL_LEN}, f"{MAX_MODEL_LEN}"),
    "empty prompt": ({"prompts": ""}, "empty"),
    **{name: ({"prompts": prompt}, "") for name, prompt in broken_media().items()},
}


@pytest.mark.parametrize("name", BAD)
def test_wrong_input_is_a_value_error_and_affects_no_other_request(omni: OmniLLM, name: str) -> None:
    arguments, message = BAD[name]
    with pytest.raises(ValueError, match=message or ".{20}"):
        generate(omni, **{"prompts": PROMPT, **arguments})
    (output,) = generate(omni, modalities=["text"])
    assert output.outputs[0].text


def test_videos_that_were_sent_before_count_like_new_ones_and_a_rejected_one_can_be_sent_later(omni: OmniLLM) -> None:
    most = max_video_positions(omni.engine.orchestrator.pipeline.thinker_config.text_config)
    one = video_at(100 / (0.6 * most))  # two pairs of frames, 25 positions in a second
    two = one | {
        "prompt": format_prompt(2 * VIDEO),
        "multi_modal_data": {"video": 2 * one["multi_modal_data"]["video"]},
    }
    for _ in range(2):
        with pytest.raises(InvalidRequest, match="higher fps"):
            generate(omni, two)
        (output,) = generate(omni, one, modalities=["text"])
        assert output.outputs[0].text


def test_a_bad_prompt_among_good_ones_fails_the_call_and_leaves_nothing(omni: OmniLLM) -> None:
    with pytest.raises(InvalidRequest):
        generate(omni, [PROMPT, "x" * 2 * MAX_MODEL_LEN, PROMPT])
    assert omni.engine.orchestrator.runtime.statistics().num_open_calls == 0


def test_an_abort_returns_when_every_stage_has_released_the_request(omni: OmniLLM) -> None:
    async def run() -> None:
        engine: AsyncOmni = omni.engine
        params = SHORT | {"talker": {"temperature": 0.0, "max_tokens": 900, "ignore_eos": True}}
        outputs = engine.generate(PROMPT, params, "long", modalities=["audio", "codec_ids"])
        with pytest.raises(CallAborted):
            async for output in outputs:
                if "codec_ids" in output.multimodal_output:
                    await engine.abort("long")
                    statistics = engine.orchestrator.runtime.statistics()
                    assert statistics.num_running_activations == 0
        for stage in engine.orchestrator.engines.values():
            assert stage.llm.get_num_unfinished_requests() == 0

    omni.run(run())


def test_a_reader_that_leaves_ends_its_request(omni: OmniLLM) -> None:
    async def run() -> None:
        outputs = omni.engine.generate(PROMPT, SHORT, "left")
        async for _ in outputs:
            break
        await outputs.aclose()
        assert omni.engine.orchestrator.runtime.statistics().num_open_calls == 0

    omni.run(run())


def test_a_deadline_ends_a_request(omni: OmniLLM) -> None:
    async def run() -> None:
        params = SHORT | {"talker": {"temperature": 0.0, "max_tokens": 900}}
        with pytest.raises(DeadlineExceeded, match=r"token2wav|talker|thinker"):
            async for _ in omni.engine.generate(PROMPT, params, deadline_s=0.01):
                pass

    omni.run(run())


@pytest.mark.parametrize("value", ["x", {"payloads": [b"x"]}, {"publish": True}], ids=repr)
def test_what_a_user_puts_under_our_key_reaches_no_engine(omni: OmniLLM, value: Any) -> None:
    params = {stage: one | {"extra_args": {"omni": value}} for stage, one in SHORT.items()}
    (output,) = generate(omni, sampling_params_list=params, modalities=["codec_ids"])
    assert output.multimodal_output == generate(omni, modalities=["codec_ids"])[0].multimodal_output


def test_two_requests_with_one_id_are_rejected(omni: OmniLLM) -> None:
    async def run() -> None:
        async def all_outputs() -> list[Any]:
            return [output async for output in omni.engine.generate(PROMPT, SHORT, "same", modalities=["text"])]

        results = await asyncio.gather(all_outputs(), all_outputs(), return_exceptions=True)
        assert sum(isinstance(result, InvalidRequest) for result in results) == 1
        assert sum(isinstance(result, list) for result in results) == 1

    omni.run(run())


def test_no_thread_of_an_engine_polls_for_other_ranks(omni: OmniLLM) -> None:
    threads = {
        path.read_text().strip()
        for engine in omni.engine.orchestrator.engines.values()
        for pid in engine.pids()
        for path in Path("/proc", str(pid), "task").glob("*/comm")
    }
    assert threads and not {name for name in threads if "gloo" in name}


def test_health_is_that_of_every_stage(omni: OmniLLM) -> None:
    omni.run(omni.engine.check_health())
    assert omni.engine.is_running
    assert not omni.engine.errored


def test_omni_is_another_name_of_omni_llm() -> None:
    assert Omni is OmniLLM


def test_a_missing_model_is_rejected_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=str(tmp_path)):
        OmniLLM(tmp_path / "nothing")
    with pytest.raises(ConfigError, match="give a model"):
        OmniLLM()


def run_stage(omni: OmniLLM, stage: str, prompt_token_ids: list[int], args: dict[str, Any]) -> Any:
    """One request straight to a stage's engine, as a transfer function would send it."""

    async def first_output() -> Any:
        engine = omni.engine.orchestrator.engines[stage]
        request = StageRequest({"prompt_token_ids": prompt_token_ids}, args)
        context = RequestContext("straight", omni.engine.params.resolve(SHORT), {})
        async with aclosing(engine.generate(request, context, frozenset())) as outputs:
            async for output in outputs:
                return output

    return omni.run(first_output())


def test_speech_about_a_picture_is_the_same_where_every_message_is_encoded(omni: OmniLLM) -> None:
    prompt = {"prompt": format_prompt(IMAGE), "multi_modal_data": {"image": make_image(56, 84)}}
    params = {**SHORT, "token2wav": {"seed": 3}}
    (expected,) = generate(omni, prompt, sampling_params_list=params)
    with served_from_bytes(omni.engine.orchestrator):
        (answer,) = generate(omni, prompt, sampling_params_list=params)
    assert answer.outputs[0].token_ids == expected.outputs[0].token_ids
    assert answer.prompt_token_ids == expected.prompt_token_ids
    assert torch.equal(answer.multimodal_output["audio"], expected.multimodal_output["audio"])
    assert answer.stage_durations.keys() == expected.stage_durations.keys()
    assert answer.latency_parts.keys() == expected.latency_parts.keys() == {"thinker", "talker"}


def test_a_payload_that_the_talker_cannot_read_fails_its_request_alone(omni: OmniLLM) -> None:
    of_no_backend = Payload({"rows": TensorRef("pigeon", (3, 4), "float32", b"", lease=1)}, {"rows": None})
    for wrong in (b"\xc1 garbage", encode(of_no_backend)):
        with pytest.raises(StageFailed, match="'talker': RelayBroken"):
            run_stage(omni, "talker", [264] * 5, {"payloads": [wrong], "speaker_index": 0})
    assert generate(omni)[0].multimodal_output["audio"].shape == (20 * 480,)


@pytest.mark.parametrize("codec_ids", [[0, 10_000], [-1], [0] * 20_000], ids=["too large", "negative", "too many"])
def test_codes_that_the_vocoder_cannot_decode_fail_their_request_alone(omni: OmniLLM, codec_ids: list[int]) -> None:
    args = {"codec_ids": codec_ids, "start": 0, "keep": [0, len(codec_ids)], "speaker": "Chelsie", "seed": 0}
    with pytest.raises(StageFailed, match="'token2wav': ValueError"):  # the codes are the talker's
        run_stage(omni, "token2wav", [0], args)
    assert generate(omni)[0].multimodal_output["audio"].shape == (20 * 480,)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("talker.enable_prompt_embeds=false", r"'talker': enable_prompt_embeds = False.*True only"),
        ("thinker.enable_prompt_embeds=true", r"'thinker': enable_prompt_embeds = True.*False only"),
        ("thinker.async_scheduling=true", r"'thinker': async_scheduling = True.*False only"),
        ("thinker.speculative_config={method: ngram, num_speculative_tokens: 2}", r"speculative_config.*None only"),
        ("thinker.hf_overrides={foo: 1}", r"'thinker': hf_overrides: set by the model's pipeline"),
        ("talker.worker_cls=a.B", r"'talker': worker_cls: set by the model's pipeline"),
    ],
)
def test_engine_arguments_of_the_pipeline_cannot_be_unset(tiny_checkpoint: Path, override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        OmniLLM(tiny_checkpoint, max_model_len=MAX_MODEL_LEN, stage_overrides=[override])


def test_a_checkpoint_without_voices_is_rejected(tiny_checkpoint: Path, tmp_path: Path) -> None:
    path = shutil.copytree(tiny_checkpoint, tmp_path / "voiceless")
    (path / "spk_dict.pt").unlink()
    with pytest.raises(ConfigError, match="spk_dict"):
        OmniLLM(path)


def test_an_unknown_edge_is_rejected(tiny_checkpoint: Path) -> None:
    with pytest.raises(ConfigError, match="thinker->token2wav: the graph has no such edge"):
        OmniLLM(tiny_checkpoint, overrides={"edges": {"thinker->token2wav": {"transport": "inline"}}})
