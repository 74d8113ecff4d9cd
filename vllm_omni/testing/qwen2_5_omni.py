"""Builds a tiny random Qwen2.5-Omni checkpoint, offline, in the layout of the real one.

The result loads wherever the real checkpoint does: transformers' model and processor, and vLLM's thinker. Its weights
are random but not arbitrary. They are scaled so that a greedy reply is printable and varied and runs to its limit, the
talker speaks for hundreds of codes, and a wrong hidden state or position shows in the result.

    python -m vllm_omni.testing.qwen2_5_omni DIRECTORY [--variant wide] [--seed 1]
"""

import argparse
import math
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import (
    GenerationConfig,
    PreTrainedTokenizerFast,
    Qwen2_5OmniConfig,
    Qwen2_5OmniForConditionalGeneration,
    Qwen2_5OmniProcessor,
    Qwen2VLImageProcessor,
    Qwen2VLVideoProcessor,
    WhisperFeatureExtractor,
)

NUM_BYTES = 256
PRINTABLE = slice(32, 127)
STRIDE = 37  # coprime to 95 printable bytes and to the variants' numbers of codes
LEANING = 4.0
LOGIT_SCALE = 2.0
# Gains over fan-in scaling. Sharp attention picks single tokens of the context, so that a step is not decided by its
# input alone; the output gains are for a stage of two layers.
ATTENTION_GAIN = 2.5
# Milder in the thinker: its hidden states are compared between implementations, and sharpness multiplies rounding.
THINKER_ATTENTION_GAIN = 1.25
ATTENTION_OUTPUT_GAIN = 2.0
MLP_OUTPUT_GAIN = 0.2
# In the order of the real vocabulary; ids are given from TinyShape.first_special_id on.
SPECIAL_TOKENS = (
    "<|endoftext|> <|im_start|> <|im_end|> <|AUDIO|> <|audio_bos|> <|audio_eos|> "
    "<|vision_bos|> <|vision_eos|> <|IMAGE|> <|VIDEO|>"
).split()
# The names under which Qwen2_5OmniProcessor asks the tokenizer for them.
NAMED_TOKENS = {
    "image_token": "<|IMAGE|>",
    "audio_token": "<|AUDIO|>",
    "video_token": "<|VIDEO|>",
    "vision_bos_token": "<|vision_bos|>",
    "vision_eos_token": "<|vision_eos|>",
    "audio_bos_token": "<|audio_bos|>",
    "audio_eos_token": "<|audio_eos|>",
}

SYSTEM_PROMPT = (
    "You are Qwen, a virtual human developed by the Qwen Team, Alibaba Group, capable of perceiving auditory and "
    "visual inputs, as well as generating text and speech."
)

# A conversation without a system turn gets the default one: the talker was trained behind it.
CHAT_TEMPLATE = """\
{%- if messages[0]['role'] != 'system' -%}
{{- '<|im_start|>system\\nSYSTEM_PROMPT<|im_end|>\\n' -}}
{%- endif -%}
{%- for message in messages -%}
{{- '<|im_start|>' + message['role'] + '\\n' -}}
{%- if message['content'] is string -%}
{{- message['content'] -}}
{%- else -%}
{%- for part in message['content'] -%}
{%- set type = part.get('type') -%}
{%- if type in ('image', 'image_url') or 'image' in part or 'image_url' in part -%}
{{- '<|vision_bos|><|IMAGE|><|vision_eos|>' -}}
{%- elif type in ('audio', 'audio_url', 'input_audio') or 'audio' in part or 'audio_url' in part -%}
{{- '<|audio_bos|><|AUDIO|><|audio_eos|>' -}}
{%- elif type in ('video', 'video_url') or 'video' in part or 'video_url' in part -%}
{{- '<|vision_bos|><|VIDEO|><|vision_eos|>' -}}
{%- elif 'text' in part -%}
{{- part['text'] -}}
{%- endif -%}
{%- endfor -%}
{%- endif -%}
{{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|im_start|>assistant\\n' -}}
{%- endif -%}
""".replace("SYSTEM_PROMPT", SYSTEM_PROMPT)


@dataclass(frozen=True)
class TinyShape:
    """The sizes of a checkpoint; the defaults give 1.2 million parameters.

    Sizes that must agree are derived rather than given: encoder outputs and the talker's embeddings are as wide as the
    thinker, the speaker vectors as wide as the vocoder expects, and the vocoder embeds every id the talker can emit.
    """

    # Thinker. Its hidden size is thinker_heads * head_dim.
    head_dim: int = 32  # also the talker's; vLLM's CPU attention takes 32, 64, 80, 96, 112 or 128
    mrope_section: tuple[int, int, int] = (4, 6, 6)  # time, height, width; sums to head_dim / 2
    thinker_layers: int = 2
    thinker_heads: int = 2
    thinker_kv_heads: int = 1
    thinker_intermediate_size: int = 128
    tie_word_embeddings: bool = False
    # Encoders.
    audio_layers: int = 2
    audio_heads: int = 2
    audio_head_dim: int = 32
    vision_depth: int = 2
    vision_heads: int = 2
    vision_head_dim: int = 32
    vision_full_attention: tuple[int, ...] = (1,)
    # Talker. As in the real model, its hidden size is neither the thinker's nor heads * head_dim.
    talker_layers: int = 2
    talker_hidden_size: int = 96
    talker_heads: int = 4
    talker_kv_heads: int = 2
    talker_intermediate_size: int = 192
    # Ids.
    num_extra_tokens: int = 0  # reserved entries between the 256 bytes and the special tokens
    num_codes: int = 256  # codec ids 0..num_codes-1 are speech
    codec_special_offsets: tuple[int, int, int, int] = (4, 5, 6, 8)  # pad, start, end, mask, from num_codes
    tts_text_offsets: tuple[int, int, int] = (2, 3, 4)  # pad, start, end, from the last special token
    speakers: tuple[str, ...] = ("Chelsie", "Ethan")
    # Vocoder. 240 mel hops of 24 kHz: prod(upsample_rates) samples for each mel frame, two frames for each code.
    dit_layers: int = 3
    dit_heads: int = 2
    dit_head_dim: int = 32
    dit_hidden_size: int = 64
    dit_look_ahead_layers: tuple[int, ...] = (1,)
    dit_look_backward_layers: tuple[int, ...] = (0, 2)
    mel_dim: int = 80
    speaker_dim: int = 32
    reference_frames: int = 20
    upsample_rates: tuple[int, ...] = (5, 3, 2, 2, 2, 2)
    upsample_kernel_sizes: tuple[int, ...] = (11, 7, 4, 4, 4, 4)
    resblock_kernel_sizes: tuple[int, ...] = (3, 7, 11)
    vocoder_channels: int = 64
    # How readily a stage ends by itself: 0 never; the spread of the end's logit over that of the others' random part.
    thinker_end_scale: float = 0.0
    talker_end_scale: float = 0.0

    def __post_init__(self) -> None:
        if sum(self.mrope_section) * 2 != self.head_dim:
            raise ValueError(f"mrope_section {self.mrope_section} must sum to head_dim / 2 = {self.head_dim // 2}")
        if self.talker_hidden_size == self.talker_heads * self.head_dim:
            raise ValueError(f"talker_hidden_size {self.talker_hidden_size} must differ from heads * head_dim")
        if self.vocoder_channels < 2 ** len(self.upsample_rates):
            raise ValueError(f"vocoder_channels {self.vocoder_channels} must be 2 ** len(upsample_rates) or more")

    @property
    def hidden_size(self) -> int:
        return self.thinker_heads * self.head_dim

    @property
    def first_special_id(self) -> int:
        return NUM_BYTES + self.num_extra_tokens

    def token_id(self, token: str) -> int:
        return self.first_special_id + SPECIAL_TOKENS.index(token)

    @property
    def tts_text_ids(self) -> tuple[int, int, int]:
        """Pad, start and end of the talker's text stream: rows of the thinker's embedding above the tokenizer."""
        last = self.first_special_id + len(SPECIAL_TOKENS)
        pad, start, end = (last + offset for offset in self.tts_text_offsets)
        return pad, start, end

    @property
    def speaker_ids(self) -> dict[str, int]:
        """Speaker name -> the thinker embedding row that begins its speech."""
        first = max(self.tts_text_ids) + 2
        return {name: first + index for index, name in enumerate(self.speakers)}

    @property
    def vocab_size(self) -> int:
        return math.ceil((max(self.speaker_ids.values()) + 1) / 32) * 32

    @property
    def codec_vocab_size(self) -> int:
        return math.ceil((self.num_codes + max(self.codec_special_offsets) + 1) / 32) * 32


VARIANTS: dict[str, TinyShape] = {
    "base": TinyShape(),
    # Wider heads, a tied thinker, a talker narrower than its attention.
    "wide": TinyShape(
        head_dim=64,
        mrope_section=(16, 8, 8),
        thinker_layers=3,
        thinker_kv_heads=2,
        thinker_intermediate_size=160,
        tie_word_embeddings=True,
        audio_heads=3,
        vision_heads=3,
        talker_hidden_size=160,
        talker_heads=3,
        talker_kv_heads=1,
        speakers=("Ethan", "Chelsie"),
    ),
    # More layers and speakers, other ids, another vocoder.
    "deep": TinyShape(
        mrope_section=(6, 5, 5),
        thinker_layers=5,
        thinker_heads=3,
        thinker_kv_heads=3,
        audio_layers=3,
        vision_depth=4,
        vision_full_attention=(1, 3),
        talker_layers=3,
        talker_hidden_size=64,
        talker_kv_heads=1,
        num_extra_tokens=41,
        num_codes=200,
        codec_special_offsets=(2, 7, 3, 9),
        tts_text_offsets=(6, 1, 3),
        speakers=("Chelsie", "Ethan", "Serena", "Dylan"),
        dit_layers=5,
        dit_heads=3,
        dit_hidden_size=80,
        dit_look_ahead_layers=(2,),
        dit_look_backward_layers=(0, 3),
        mel_dim=64,
        speaker_dim=48,
        reference_frames=33,
        upsample_rates=(5, 4, 3, 2, 2),
        upsample_kernel_sizes=(11, 8, 7, 4, 4),
        resblock_kernel_sizes=(3, 5),
        vocoder_channels=32,
    ),
}
# Stages which stop by themselves, after some dozens of tokens.
VARIANTS["short"] = replace(VARIANTS["base"], thinker_end_scale=5.0, talker_end_scale=5.0)


def build(
    path: Path, *, seed: int = 0, variant: str = "base", dtype: str = "float32", shape: TinyShape | None = None
) -> Path:
    """Write a checkpoint into ``path``, which is made if need be; the same arguments give the same bytes.

    Args:
        seed: of the weights and of the speakers' voices.
        variant: a key of ``VARIANTS``; unused when ``shape`` is given.
        dtype: of the weights in the file, ``float32`` or ``bfloat16``.

    Returns:
        ``path``.

    Raises:
        ValueError: no such variant.
    """
    if shape is None:
        if variant not in VARIANTS:
            raise ValueError(f"no variant {variant!r}; there are {sorted(VARIANTS)}")
        shape = VARIANTS[variant]
    path.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng(devices=[]):  # transformers draws from the global generator while it constructs
        model = Qwen2_5OmniForConditionalGeneration(make_config(shape))
    randomize(model, shape, generator)
    end_ids = [shape.token_id("<|im_end|>"), shape.token_id("<|endoftext|>")]
    model.generation_config = GenerationConfig(eos_token_id=end_ids, pad_token_id=shape.token_id("<|endoftext|>"))
    model.to(getattr(torch, dtype)).save_pretrained(path)
    model.config.architectures = ["Qwen2_5OmniModel"]  # the real file's name for it, over the class's own
    model.config.save_pretrained(path)
    torch.save(make_speakers(shape, generator), path / "spk_dict.pt")
    make_processor(shape).save_pretrained(path)
    return path


def make_config(shape: TinyShape) -> Qwen2_5OmniConfig:
    rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": list(shape.mrope_section)}
    tts_pad, tts_start, tts_end = shape.tts_text_ids
    codec_pad, codec_start, codec_end, codec_mask = (shape.num_codes + offset for offset in shape.codec_special_offsets)
    media_ids = {
        "audio_token_index": shape.token_id("<|AUDIO|>"),
        "image_token_index": shape.token_id("<|IMAGE|>"),
        "video_token_index": shape.token_id("<|VIDEO|>"),
        "audio_start_token_id": shape.token_id("<|audio_bos|>"),
        "audio_end_token_id": shape.token_id("<|audio_eos|>"),
        "vision_start_token_id": shape.token_id("<|vision_bos|>"),
        "vision_end_token_id": shape.token_id("<|vision_eos|>"),
        "position_id_per_seconds": 25,
        "seconds_per_chunk": 2,
    }
    text_config = {
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.thinker_intermediate_size,
        "num_hidden_layers": shape.thinker_layers,
        "num_attention_heads": shape.thinker_heads,
        "num_key_value_heads": shape.thinker_kv_heads,
        "max_position_embeddings": 32768,
        "rope_parameters": rope,
        "tie_word_embeddings": shape.tie_word_embeddings,
        "eos_token_id": shape.token_id("<|im_end|>"),
        "pad_token_id": shape.token_id("<|endoftext|>"),
    }
    audio_config = {
        "d_model": shape.audio_heads * shape.audio_head_dim,
        "encoder_layers": shape.audio_layers,
        "encoder_attention_heads": shape.audio_heads,
        "encoder_ffn_dim": 2 * shape.audio_heads * shape.audio_head_dim,
        "num_mel_bins": 128,
        "n_window": 100,
        "output_dim": shape.hidden_size,
    }
    vision_config = {
        "depth": shape.vision_depth,
        "hidden_size": shape.vision_heads * shape.vision_head_dim,
        "intermediate_size": 2 * shape.vision_heads * shape.vision_head_dim,
        "num_heads": shape.vision_heads,
        "out_hidden_size": shape.hidden_size,
        "fullatt_block_indexes": list(shape.vision_full_attention),
    }
    thinker_config = {
        "text_config": text_config,
        "audio_config": audio_config,
        "vision_config": vision_config,
        "tie_word_embeddings": shape.tie_word_embeddings,
        "user_token_id": ord("u"),
        **media_ids,
    }
    talker_config = {
        "vocab_size": shape.codec_vocab_size,
        "embedding_size": shape.hidden_size,
        "hidden_size": shape.talker_hidden_size,
        "intermediate_size": shape.talker_intermediate_size,
        "num_hidden_layers": shape.talker_layers,
        "num_attention_heads": shape.talker_heads,
        "num_key_value_heads": shape.talker_kv_heads,
        "head_dim": shape.head_dim,
        "rope_parameters": rope,
        "tts_text_pad_token_id": tts_pad,
        "tts_text_start_token_id": tts_start,
        "tts_text_end_token_id": tts_end,
        "tts_codec_pad_token_id": codec_pad,
        "tts_codec_start_token_id": codec_start,
        "tts_codec_end_token_id": codec_end,
        "tts_codec_mask_token_id": codec_mask,
        **media_ids,
    }
    dit_config = {
        "hidden_size": shape.dit_hidden_size,
        "num_hidden_layers": shape.dit_layers,
        "num_attention_heads": shape.dit_heads,
        "head_dim": shape.dit_head_dim,
        "emb_dim": 32,
        "num_embeds": shape.codec_vocab_size,
        "look_ahead_layers": list(shape.dit_look_ahead_layers),
        "look_backward_layers": list(shape.dit_look_backward_layers),
        "mel_dim": shape.mel_dim,
        "enc_emb_dim": shape.speaker_dim,
        "enc_dim": 16,
        "enc_channels": [32, 32, 32, 32, 96],
        "enc_attention_channels": 16,
        "enc_se_channels": 16,
        "dropout": 0.0,
    }
    bigvgan_config = {
        "mel_dim": shape.mel_dim,
        "upsample_initial_channel": shape.vocoder_channels,
        "upsample_rates": list(shape.upsample_rates),
        "upsample_kernel_sizes": list(shape.upsample_kernel_sizes),
        "resblock_kernel_sizes": list(shape.resblock_kernel_sizes),
        "resblock_dilation_sizes": [[1, 3, 5] for _ in shape.resblock_kernel_sizes],
    }
    return Qwen2_5OmniConfig(
        thinker_config=thinker_config,
        talker_config=talker_config,
        token2wav_config={"dit_config": dit_config, "bigvgan_config": bigvgan_config},
    )


@torch.no_grad()
def randomize(model: Qwen2_5OmniForConditionalGeneration, shape: TinyShape, generator: torch.Generator) -> None:
    """Overwrite every parameter. The library's own std of 0.02 would make all outputs nearly equal."""
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if "norm" in name.split(".")[-2] or name.endswith("ln_q.weight"):
            parameter.copy_(noise * 0.1 + (1.0 if name.endswith("weight") else 0.0))
        elif parameter.ndim == 1:  # biases, and the exponents of the vocoder's periodic activations
            parameter.copy_(noise * 0.1)
        elif "embed_tokens" in name or "codec_embed" in name:
            parameter.copy_(noise * 0.5)
        else:
            fan_in = parameter[0].numel() if "ups." not in name else parameter.shape[0] * parameter.shape[2]
            gain = get_gain(name, shape)
            parameter.copy_(noise * gain / math.sqrt(fan_in))

    # Only printable ASCII can be replied, so that the text of a reply is worth reading and no special token is forged.
    printable = torch.zeros(shape.vocab_size, 1)
    printable[PRINTABLE] = 1.0
    printable[shape.token_id("<|im_end|>")] = LOGIT_SCALE * shape.thinker_end_scale
    embeddings = model.thinker.model.embed_tokens.weight
    if shape.tie_word_embeddings:
        # The same rows are looked up by prompts and talker; small ones never win and still carry information.
        embeddings.mul_(printable.clamp(min=0.2))
        # With gains of one sign every token would be its own best successor.
        model.thinker.model.norm.weight.mul_(torch.randn(shape.hidden_size, generator=generator).sign())
    else:
        model.thinker.lm_head.weight.mul_(printable)
        favour_successors(model.thinker.lm_head.weight[PRINTABLE], embeddings[PRINTABLE])
    head = model.talker.codec_head.weight
    end = head[model.talker.codec_eos_token] * LOGIT_SCALE * shape.talker_end_scale
    head[shape.num_codes :] = 0.0
    head[model.talker.codec_eos_token] = end
    code_embeddings = model.talker.model.embed_tokens.weight[: shape.num_codes]
    favour_successors(head[: shape.num_codes], code_embeddings @ model.talker.thinker_to_talker_proj.weight.T)
    # Otherwise the waveform would be clipped at 1.0, which hides differences.
    model.token2wav.code2wav_bigvgan_model.conv_post.weight.mul_(0.06)


def get_gain(name: str, shape: TinyShape) -> float:
    """How much wider than fan-in scaling the decoder's matrix of this name is; 1 for other modules."""
    if ".model.layers." not in name:
        return 1.0
    num_layers = shape.thinker_layers if name.startswith("thinker.") else shape.talker_layers
    match name.split(".")[-2]:
        case "q_proj" | "k_proj":
            return THINKER_ATTENTION_GAIN if name.startswith("thinker.") else ATTENTION_GAIN
        case "o_proj":
            return ATTENTION_OUTPUT_GAIN * math.sqrt(2 / num_layers)
        case "down_proj":
            return MLP_OUTPUT_GAIN * math.sqrt(2 / num_layers)
    return 1.0


def favour_successors(head: Tensor, inputs: Tensor) -> None:
    """Add to an output head, [V, H], a leaning from each id to the one ``STRIDE`` above it, modulo V.

    Left alone, a random decoder soon falls into a cycle of two or three ids. With the leaning it walks through the
    vocabulary; attention, which sees the history, still decides most of the steps.

    Args:
        head: changed in place.
        inputs: [V, H], what each id puts into the residual stream.
    """
    directions = inputs / inputs.norm(dim=-1, keepdim=True)
    head.mul_(LOGIT_SCALE).add_(LEANING * LOGIT_SCALE * directions.roll(STRIDE, dims=0))


def make_speakers(shape: TinyShape, generator: torch.Generator) -> dict[str, dict[str, int | Tensor]]:
    return {
        name: {
            "bos_token": bos_id,
            "cond": torch.randn(1, shape.speaker_dim, generator=generator),
            "ref_mel": torch.randn(1, shape.reference_frames, shape.mel_dim, generator=generator),
        }
        for name, bos_id in shape.speaker_ids.items()
    }


def make_processor(shape: TinyShape) -> Qwen2_5OmniProcessor:
    return Qwen2_5OmniProcessor(
        image_processor=Qwen2VLImageProcessor(size={"shortest_edge": 56 * 56, "longest_edge": 1280 * 28 * 28}),
        video_processor=Qwen2VLVideoProcessor(cap_pixels_per_frame=False),
        feature_extractor=WhisperFeatureExtractor(feature_size=128, chunk_length=300, return_attention_mask=True),
        tokenizer=make_tokenizer(shape),
        chat_template=CHAT_TEMPLATE,
    )


def make_tokenizer(shape: TinyShape) -> PreTrainedTokenizerFast:
    """One token per byte, with the byte as its id, and the special tokens."""
    vocab = {character: byte for byte, character in _byte_characters().items()}
    vocab |= {f"<|extra_{index}|>": NUM_BYTES + index for index in range(shape.num_extra_tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        extra_special_tokens=NAMED_TOKENS,
        model_max_length=32768,
    )


def _byte_characters() -> dict[int, str]:
    """The byte-level alphabet: a byte that is a visible Latin-1 character is itself, the rest begin at U+0100."""
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = (byte for byte in range(NUM_BYTES) if byte not in visible)
    return {byte: chr(byte) for byte in visible} | {byte: chr(0x100 + index) for index, byte in enumerate(hidden)}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Build a tiny random Qwen2.5-Omni checkpoint.")
    parser.add_argument("path", type=Path)
    parser.add_argument("--variant", choices=sorted(VARIANTS), default="base")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    arguments = parser.parse_args()
    print(build(arguments.path, seed=arguments.seed, variant=arguments.variant, dtype=arguments.dtype))
