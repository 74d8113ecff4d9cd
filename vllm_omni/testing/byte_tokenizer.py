"""What tiny checkpoints of several models share: a tokenizer with one token per byte, and a chat template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

NUM_BYTES = 256

_TURNS = """\
{%- for message in messages -%}
{{- '<|im_start|>' + message['role'] + '\\n' -}}
{%- if message['content'] is string -%}
{{- message['content'] -}}
{%- else -%}
{%- for part in message['content'] -%}
{%- set type = part.get('type') -%}
{%- if type in ('image', 'image_url') or 'image' in part or 'image_url' in part -%}
{{- 'IMAGE' -}}
{%- elif type in ('audio', 'audio_url', 'input_audio') or 'audio' in part or 'audio_url' in part -%}
{{- 'AUDIO' -}}
{%- elif type in ('video', 'video_url') or 'video' in part or 'video_url' in part -%}
{{- 'VIDEO' -}}
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
"""


def chat_template(named_tokens: Mapping[str, str]) -> str:
    """One turn after the other, without a default system turn.

    Args:
        named_tokens: see ``make_tokenizer``; ``image_token``, ``audio_token`` and ``video_token`` stand for media, each
            between the two that mark the ends of its kind.
    """

    def between(medium: str, ends: str) -> str:
        names = (f"{ends}_bos_token", f"{medium}_token", f"{ends}_eos_token")
        return "".join(named_tokens[name] for name in names)

    template = _TURNS
    for medium, ends in (("image", "vision"), ("audio", "audio"), ("video", "vision")):
        template = template.replace(f"'{medium.upper()}'", f"'{between(medium, ends)}'")
    return template


def make_tokenizer(
    alphabet: Sequence[str],
    special_tokens: Sequence[str],
    named_tokens: Mapping[str, str],
    num_extra_tokens: int = 0,
    *,
    eos_token: str = "<|im_end|>",
    pad_token: str = "<|endoftext|>",
) -> PreTrainedTokenizerFast:
    """One token per byte, then unused ones, then the special tokens; without merges.

    Args:
        alphabet: characters of the byte-level alphabet in the order of their ids.
        named_tokens: attribute of the tokenizer, which processors read -> special token.
    """
    vocabulary = {character: index for index, character in enumerate(alphabet)}
    vocabulary |= {f"<|extra_{index}|>": NUM_BYTES + index for index in range(num_extra_tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special_tokens])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=eos_token,
        pad_token=pad_token,
        extra_special_tokens=dict(named_tokens),
        model_max_length=32768,
    )
