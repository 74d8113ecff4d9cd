"""LongCat-Flash, and the graph of LongCat-Next on it (``examples/longcat_next.py``): ids as transformers' own.

The decoders are Janus-Pro's and MiMo-Audio's: pictures as transformers decodes them, sound as the codec does alone. In
processes, as deployed: vLLM keeps rotary tables by process.
"""

import importlib.util
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, JanusForConditionalGeneration, LongcatFlashForCausalLM

from vllm_omni import OmniLLM
from vllm_omni.errors import ConfigError
from vllm_omni.messages.outputs import OmniRequestOutput
from vllm_omni.model_executor.models.janus.image_decoder import images_of
from vllm_omni.model_executor.models.mimo_audio.audio_tokenizer import codec_directory, load_decoder, read_codec_config
from vllm_omni.testing import janus, longcat_flash, mimo_audio

pytestmark = [pytest.mark.timeout(400), pytest.mark.long]

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
SETTINGS: dict[str, Any] = {"dtype": "float32", "max_model_len": 512, "block_size": 32, "max_num_batched_tokens": 128}
SETTINGS |= {"enforce_eager": True, "attention_backend": "CPU_MLA"}
KV_CACHE_BYTES = 16 << 20
PROMPTS = ["a b c d", "hello there, what is a relay? " * 6, "x" * 200]
NUM_TOKENS = 24
NUM_AUDIO_IDS = 64
SHAPE = janus.VARIANTS["base"]
LONG = 240  # tokens, among which there are those of pictures and of sound
IDS = {"num_audio_ids": NUM_AUDIO_IDS, "num_image_ids": SHAPE.num_codes}


def pipeline(name: str, cls: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, cls)


def greedy_ids(model: LongcatFlashForCausalLM, checkpoint: Path, num_tokens: int) -> list[list[int]]:
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    answers = []
    for prompt in PROMPTS:
        ids = torch.tensor([tokenizer.encode(prompt)])
        made = model.generate(ids, max_new_tokens=num_tokens, do_sample=False, eos_token_id=None)
        answers.append(made[0, ids.shape[1] :].tolist())
    return answers


def generate(omni: OmniLLM, num_tokens: int, **more: Any) -> list[OmniRequestOutput]:
    params = {"temperature": 0.0, "max_tokens": num_tokens, "ignore_eos": True}
    return omni.generate(PROMPTS, params, use_tqdm=False, **more)


def ids_of(answers: Sequence[OmniRequestOutput]) -> list[list[int]]:
    return [list(answer.outputs[0].token_ids) for answer in answers]


# -- the language model ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stages", [("language",), ("prefill", "decode")], ids=["whole", "prefill-decode"])
def test_the_ids_of_a_model_with_experts_that_compute_nothing_are_those_of_transformers(
    tmp_path: Path, stages: Sequence[str]
) -> None:
    checkpoint = longcat_flash.build(tmp_path)
    expected = greedy_ids(longcat_flash.make_model(), checkpoint, NUM_TOKENS)
    split = {"pipeline": pipeline("prefill_decode", "PrefillDecode")} if len(stages) > 1 else {}
    blocks = [f"{stage}.kv_cache_memory_bytes={KV_CACHE_BYTES}" for stage in stages]
    with OmniLLM(checkpoint, stage_overrides=blocks, **split, **SETTINGS) as omni:
        assert ids_of(generate(omni, NUM_TOKENS)) == expected


# -- the graph of LongCat-Next -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    path = tmp_path_factory.mktemp("checkpoints")
    return {
        "backbone": longcat_flash.build(path / "longcat", **IDS),
        "image_decoder": janus.build(path / "janus"),
        "audio_decoder": mimo_audio.build(path / "mimo"),
    }


@pytest.fixture(scope="module")
def expected(checkpoints: dict[str, Path]) -> list[list[int]]:
    return greedy_ids(longcat_flash.make_model(**IDS), checkpoints["backbone"], LONG)


@pytest.fixture(scope="module")
def omni(checkpoints: dict[str, Path]) -> Iterator[OmniLLM]:
    class LongCatNext(pipeline("longcat_next", "LongCatNext")):  # type: ignore[misc]
        num_picture_codes = SHAPE.num_image_tokens

    models = [f"{name}.model={checkpoints[name]}" for name in ("image_decoder", "audio_decoder")]
    blocks = f"backbone.kv_cache_memory_bytes={KV_CACHE_BYTES}"
    with OmniLLM(checkpoints["backbone"], pipeline=LongCatNext, stage_overrides=[*models, blocks], **SETTINGS) as omni:
        yield omni


def codes_in(ids: Sequence[int], start: int, count: int) -> list[int]:
    return [token - start for token in ids if start <= token < start + count]


def test_a_reply_is_text_pictures_and_sound(
    omni: OmniLLM, checkpoints: dict[str, Path], expected: list[list[int]]
) -> None:
    vq = JanusForConditionalGeneration.from_pretrained(checkpoints["image_decoder"]).model.vqmodel.eval()
    directory = codec_directory(str(checkpoints["audio_decoder"]))
    codec = load_decoder(read_codec_config(directory), 2, directory)
    answers = generate(omni, LONG, modalities=["text", "image", "audio"])
    assert ids_of(answers) == expected
    num_pictures = num_sounds = 0
    for answer, ids in zip(answers, expected, strict=True):
        assert "<|" not in answer.outputs[0].text  # codes are no text
        codes = codes_in(ids, longcat_flash.NUM_TEXT_IDS + NUM_AUDIO_IDS, SHAPE.num_codes)
        size = SHAPE.num_image_tokens
        images = answer.multimodal_output["images"]
        assert len(images) == len(codes) // size
        for number, image in enumerate(images):
            one = torch.tensor([codes[number * size : (number + 1) * size]])
            with torch.inference_mode():
                pixels = vq.decode(one).float()
            assert (image.int() - images_of(pixels)[0].int()).abs().max() <= 1
        frames = codes_in(ids, longcat_flash.NUM_TEXT_IDS, NUM_AUDIO_IDS)
        frames = frames[: len(frames) // 2 * 2]
        sound = answer.multimodal_output["audio"]
        if frames:
            with torch.inference_mode():
                wave = codec(torch.tensor(frames).view(1, -1, 2))[0]
            torch.testing.assert_close(sound, wave, rtol=0, atol=1e-5)
        else:
            assert not len(sound)
        num_pictures += len(images)
        num_sounds += bool(frames)
    assert num_pictures and num_sounds, "the tiny model writes some of each"


def test_a_branch_that_is_not_asked_for_is_not_reached(omni: OmniLLM, expected: list[list[int]]) -> None:
    for modality, stages in (("text", set()), ("image", {"image_decoder"}), ("audio", {"audio_decoder"})):
        answers = generate(omni, LONG, modalities=[modality])
        assert ids_of(answers) == expected
        ran = {name for answer in answers for name in answer.stage_durations}
        assert ran == {"backbone", "total", *stages}


def test_a_backbone_that_does_not_say_where_its_codes_begin_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"audio_offset = None, visual_offset = None: must be the first ids of sound"):
        OmniLLM(longcat_flash.build(tmp_path), pipeline=pipeline("longcat_next", "LongCatNext"), **SETTINGS)
