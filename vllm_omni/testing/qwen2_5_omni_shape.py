"""``TinyShape``: sizes and token ids of tiny Qwen2.5-Omni checkpoints, and ``VARIANTS`` of them."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from vllm_omni.testing.byte_tokenizer import NUM_BYTES

# In the order of the real vocabulary; ids start at TinyShape.first_special_id.
SPECIAL_TOKENS = (
    "<|endoftext|> <|im_start|> <|im_end|> <|AUDIO|> <|audio_bos|> <|audio_eos|> "
    "<|vision_bos|> <|vision_eos|> <|IMAGE|> <|VIDEO|>"
).split()


@dataclass(frozen=True)
class TinyShape:
    """Sizes of a checkpoint; the defaults give a million parameters.

    Sizes that must agree are derived: encoder outputs and the talker's embeddings are as wide as the thinker, the
    speaker vectors as wide as the vocoder expects, and the vocoder embeds every id that the talker can emit.
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
    dit_layers: int = 2
    dit_heads: int = 2
    dit_head_dim: int = 32
    dit_hidden_size: int = 64
    dit_look_ahead_layers: tuple[int, ...] = (1,)
    dit_look_backward_layers: tuple[int, ...] = (0,)
    mel_dim: int = 80
    speaker_dim: int = 32
    reference_frames: int = 20
    upsample_rates: tuple[int, ...] = (5, 3, 2, 2, 2, 2)
    upsample_kernel_sizes: tuple[int, ...] = (11, 7, 4, 4, 4, 4)
    resblock_kernel_sizes: tuple[int, ...] = (3,)
    vocoder_channels: int = 64
    loudness: float = 0.006  # scale of the waveform, which is clipped at 1.0: that would hide differences
    # Spread of the end token's logit, relative to the random part of the others; 0: a stage never ends by itself.
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
        """Speaker name -> row of the thinker's embedding with which its speech starts."""
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
    # Wider heads, a tied thinker, a talker narrower than its attention, all of the real vocoder's kinds of blocks.
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
        dit_layers=3,
        dit_look_backward_layers=(0, 2),
        resblock_kernel_sizes=(3, 7, 11),
        loudness=0.06,
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
        loudness=0.06,
    ),
}
# Stages that end by themselves, after some dozens of tokens.
VARIANTS["short"] = replace(VARIANTS["base"], thinker_end_scale=5.0, talker_end_scale=5.0)
