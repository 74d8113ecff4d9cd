from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from transformers import (
    AutoProcessor,
    AutoTokenizer,
    PreTrainedModel,
    Qwen2_5OmniConfig,
    Qwen2_5OmniForConditionalGeneration,
)

from tests.reference.media import CASES
from tests.reference.qwen2_5_omni import Reference
from vllm_omni.testing.qwen2_5_omni import SYSTEM_PROMPT, VARIANTS, TinyShape, build

TEXT = next(case for case in CASES if case.name == "text")
OTHERS = tuple(sorted(VARIANTS.keys() - {"base"}))
all_variants = pytest.mark.parametrize("variants", [("base",), pytest.param(OTHERS, marks=pytest.mark.long)])


@pytest.fixture(scope="module")
def make_path(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Variant -> its checkpoint."""
    return cache(lambda variant: build(tmp_path_factory.mktemp(variant), variant=variant))


@pytest.fixture(scope="module")
def path(make_path: Callable[[str], Path]) -> Path:
    return make_path("base")


def read_files(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in path.iterdir()}


@all_variants
def test_loads_without_missing_or_unexpected_keys(make_path: Callable[[str], Path], variants: Sequence[str]) -> None:
    # The class's own from_pretrained cannot return the loading report.
    load = PreTrainedModel.from_pretrained.__func__
    for variant in variants:
        _, report = load(Qwen2_5OmniForConditionalGeneration, make_path(variant), output_loading_info=True)
        assert not any(report.values()), (variant, report)


@all_variants
def test_weights_have_the_real_names(make_path: Callable[[str], Path], variants: Sequence[str]) -> None:
    expected = {"thinker.model", "thinker.audio_tower", "thinker.visual", "talker.model", "talker.codec_head"}
    expected |= {"talker.thinker_to_talker_proj", "token2wav.code2wav_dit_model", "token2wav.code2wav_bigvgan_model"}
    for variant in variants:
        with safe_open(make_path(variant) / "model.safetensors", "pt") as file:
            prefixes = {".".join(name.split(".")[:2]) for name in file.keys()}  # noqa: SIM118 - not a mapping
        assert prefixes - {"thinker.lm_head"} == expected, variant


def test_processor_loads(path: Path) -> None:
    processor = AutoProcessor.from_pretrained(path)
    assert type(processor).__name__ == "Qwen2_5OmniProcessor"
    text = "<|im_start|>héllo<|im_end|>"
    assert processor.tokenizer.decode(AutoTokenizer.from_pretrained(path)(text).input_ids) == text


@all_variants
def test_every_special_id_has_a_row(make_path: Callable[[str], Path], variants: Sequence[str]) -> None:
    for variant in variants:
        path = make_path(variant)
        config = Qwen2_5OmniConfig.from_pretrained(path)
        talker, dit = config.talker_config, config.token2wav_config.dit_config
        speakers = torch.load(path / "spk_dict.pt", weights_only=True)
        text_ids = [talker.tts_text_pad_token_id, talker.tts_text_start_token_id, talker.tts_text_end_token_id]
        text_ids += [voice["bos_token"] for voice in speakers.values()]
        assert len(speakers) >= 2, variant
        assert len(set(text_ids)) == len(text_ids), variant
        assert len(AutoTokenizer.from_pretrained(path)) <= min(text_ids), variant
        assert max(text_ids) < config.thinker_config.text_config.vocab_size, variant
        assert talker.hidden_size != talker.num_attention_heads * talker.head_dim, variant
        assert dit.num_embeds >= talker.vocab_size - 1, variant


@all_variants
def test_the_same_seed_gives_the_same_bytes(
    make_path: Callable[[str], Path], variants: Sequence[str], tmp_path: Path
) -> None:
    torch.manual_seed(99)  # the caller's random state must not matter
    state = torch.get_rng_state()
    for variant in variants:
        assert read_files(build(tmp_path / variant, variant=variant)) == read_files(make_path(variant)), variant
    assert torch.equal(torch.get_rng_state(), state)


def test_another_seed_gives_other_weights(path: Path, tmp_path: Path) -> None:
    files, others = read_files(path), read_files(build(tmp_path, seed=1))
    assert {name for name in files if files[name] != others[name]} == {"model.safetensors", "spk_dict.pt"}


@pytest.mark.parametrize("variant", ["base", *(pytest.param(name, marks=pytest.mark.long) for name in OTHERS)])
def test_reply_and_speech_are_long_and_varied(variant: str, make_path: Callable[[str], Path]) -> None:
    answer = Reference(make_path(variant)).answer(TEXT, max_tokens=24, max_codes=220)
    reply, speech = answer.reply, answer.speech
    assert all(32 <= token < 127 for token in reply.token_ids if token < 256)
    if variant == "short":
        assert speech.finished
        return
    assert len(reply.token_ids) == 24
    assert len(speech.codes) == 220
    assert len(set(reply.token_ids)) > 5
    assert len(set(speech.codes)) > 50
    # float32 rounding moves logits by about 1e-4
    assert min(reply.margins.min(), speech.margins.min()) > 1e-3
    assert speech.waveform.std() > 0.005
    assert speech.waveform.abs().max() < 0.9


def test_bfloat16(tmp_path: Path):
    with safe_open(build(tmp_path, dtype="bfloat16") / "model.safetensors", "pt") as file:
        assert {file.get_slice(name).get_dtype() for name in file.keys()} == {"BF16"}  # noqa: SIM118 - not a mapping


def test_the_chat_template_marks_media_in_every_spelling(path: Path) -> None:
    for part in ({"type": "image", "image": "x"}, {"type": "image_url", "image_url": {"url": "x"}}, {"type": "image"}):
        assert render(path, [part, {"type": "text", "text": "Why?"}]) == "<|vision_bos|><|IMAGE|><|vision_eos|>Why?"
    for kind in ("audio", "audio_url", "input_audio"):
        assert render(path, [{"type": kind, kind: {"data": "x"}}]) == "<|audio_bos|><|AUDIO|><|audio_eos|>", kind
    for kind in ("video", "video_url"):
        assert render(path, [{"type": kind, kind: {"url": "x"}}]) == "<|vision_bos|><|VIDEO|><|vision_eos|>", kind


def render(path: Path, content: str | list[dict]) -> str:
    """The user's turn, between its header and its end."""
    tokenizer = AutoTokenizer.from_pretrained(path)
    text = tokenizer.apply_chat_template([{"role": "user", "content": content}], tokenize=False)
    system = f"<|im_start|>system\n{SYSTEM_PROMPT}<|im_end|>\n"
    assert text.startswith(f"{system}<|im_start|>user\n") and text.endswith("<|im_end|>\n")
    return text.removeprefix(f"{system}<|im_start|>user\n").removesuffix("<|im_end|>\n")


def test_chat_template_of_several_turns(path: Path):
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": [{"type": "text", "text": "Hello"}]},
        {"role": "user", "content": "Bye"},
    ]
    text = AutoTokenizer.from_pretrained(path).apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
        "<|im_start|>assistant\nHello<|im_end|>\n<|im_start|>user\nBye<|im_end|>\n<|im_start|>assistant\n"
    )


def test_an_inconsistent_shape_is_rejected():
    with pytest.raises(ValueError, match="mrope_section"):
        TinyShape(head_dim=64)
    with pytest.raises(ValueError, match="talker_hidden_size"):
        TinyShape(talker_hidden_size=128)


def test_unknown_variant_is_named(tmp_path: Path):
    with pytest.raises(ValueError, match=r"'huge'.*base"):
        build(tmp_path, variant="huge")
