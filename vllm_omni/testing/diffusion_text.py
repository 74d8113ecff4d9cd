"""Makers of the tokenizers and text encoders of tiny checkpoints: real classes, built without a file.

A vocabulary is single characters and, where a pipeline removes the tokens of its prompt template by their number, the
words of that template, so that it removes the same text as in the real checkpoint. A prompt is about as many tokens as
bytes.
"""

from __future__ import annotations

import inspect
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokenizers.pre_tokenizers import PreTokenizer
    from transformers import PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin

PRINTABLE = [chr(code) for code in range(32, 127)]
# In the order of the real vocabulary.
QWEN_SPECIAL_TOKENS = (
    "<|endoftext|> <|im_start|> <|im_end|> <|object_ref_start|> <|object_ref_end|> <|box_start|> <|box_end|> "
    "<|quad_start|> <|quad_end|> <|vision_start|> <|vision_end|> <|vision_pad|> <|image_pad|> <|video_pad|>"
).split()


LLAMA_SPECIAL_TOKENS = "<|begin_of_text|> <|end_of_text|> <|start_header_id|> <|end_header_id|> <|eot_id|>".split()
QWEN_CHAT_TEMPLATE = """\
{%- for message in messages -%}
{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|im_start|>assistant\\n' -}}
{%- if enable_thinking is false -%}
{{- '<think>\\n\\n</think>\\n\\n' -}}
{%- endif -%}
{%- endif -%}
"""


def make_tokenizer(name: str, pipeline_class: Any) -> PreTrainedTokenizerBase:
    """Make the tokenizer of this name in ``diffusion.yaml``."""
    match name:
        case "qwen" | "qwen_chat":
            tokenizer = make_qwen_tokenizer(find_prompt_template(pipeline_class))
            if name == "qwen_chat":
                tokenizer.chat_template = QWEN_CHAT_TEMPLATE
            return tokenizer
        case "llama":
            return make_llama_tokenizer(find_prompt_template(pipeline_class))
        case "t5_short":
            return make_t5_tokenizer(max_length=128)
    makers = {
        "byt5": make_byt5_tokenizer,
        "clip": make_clip_tokenizer,
        "gemma": make_gemma_tokenizer,
        "t5": make_t5_tokenizer,
    }
    return makers[name]()


def find_prompt_template(pipeline_class: Any) -> str:
    """Prompt template of a pipeline; without one, the roles of a chat."""
    module = import_module(pipeline_class.__module__)
    if hasattr(module, "DEFAULT_PROMPT_TEMPLATE"):
        return module.DEFAULT_PROMPT_TEMPLATE["template"]
    pipeline = pipeline_class(**dict.fromkeys(inspect.signature(pipeline_class).parameters))
    return getattr(pipeline, "prompt_template_encode", "system user assistant")


def make_qwen_tokenizer(template: str) -> PreTrainedTokenizerBase:
    """Make Qwen2's tokenizer; the words of ``template`` are one token each, as in the real vocabulary."""
    from transformers import Qwen2Tokenizer

    vocab, merges = make_byte_level_vocabulary(template, QWEN_SPECIAL_TOKENS)
    return Qwen2Tokenizer(
        vocab=vocab,
        merges=merges,
        eos_token="<|im_end|>",
        extra_special_tokens=QWEN_SPECIAL_TOKENS,
        model_max_length=131072,
    )


def make_llama_tokenizer(template: str) -> PreTrainedTokenizerBase:
    """Make Llama 3's tokenizer; otherwise as ``make_qwen_tokenizer``."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, processors
    from transformers import PreTrainedTokenizerFast

    vocab, merges = make_byte_level_vocabulary(template, LLAMA_SPECIAL_TOKENS)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = make_word_splitter()
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in LLAMA_SPECIAL_TOKENS])
    start = LLAMA_SPECIAL_TOKENS[0]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{start} $A", pair=f"{start} $A {start} $B", special_tokens=[(start, vocab[start])]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=start,
        eos_token="<|end_of_text|>",
        pad_token="<|end_of_text|>",
        model_max_length=131072,
    )


def make_byte_level_vocabulary(
    template: str, special_tokens: list[str]
) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Make the ids of all bytes, the words of ``template`` and their prefixes, and special tokens; and the merges."""
    from tokenizers import pre_tokenizers

    for token in [*special_tokens, "{}"]:
        template = template.replace(token, "\0")
    split = make_word_splitter().pre_tokenize_str
    # Every word is merged from its left: t h e -> th e -> the. Words that start with a space come first; else the
    # prefix of another word would be merged within them.
    words = sorted(
        {word for part in template.split("\0") for word, _ in split(part)},
        key=lambda word: (not word.startswith("Ġ"), word),
    )
    merges = list(dict.fromkeys((word[:end], word[end]) for word in words for end in range(1, len(word))))
    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *(left + right for left, right in merges), *special_tokens]
    return {token: index for index, token in enumerate(tokens)}, merges


def make_word_splitter() -> PreTokenizer:
    """Make Qwen2's pre-tokenizer; Llama 3's differs only in numbers of several digits."""
    from transformers import Qwen2Tokenizer

    return Qwen2Tokenizer(vocab={"a": 0}).backend_tokenizer.pre_tokenizer


def make_clip_tokenizer() -> PreTrainedTokenizerBase:
    """Make CLIP's tokenizer: a token per byte, another one where it ends a word."""
    from tokenizers import pre_tokenizers
    from transformers import CLIPTokenizer

    characters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [*characters, *(character + "</w>" for character in characters), "<|startoftext|>", "<|endoftext|>"]
    return CLIPTokenizer(vocab={token: index for index, token in enumerate(tokens)}, merges=[], model_max_length=77)


def make_qwen_vl_processor(tokenizer: PreTrainedTokenizerBase) -> ProcessorMixin:
    """Make Qwen2-VL's processor. An image becomes at most 16 tokens; the real 16,384 would dominate a small test."""
    from transformers import Qwen2VLImageProcessor, Qwen2VLProcessor, Qwen2VLVideoProcessor

    return Qwen2VLProcessor(
        image_processor=Qwen2VLImageProcessor(size={"shortest_edge": 56 * 56, "longest_edge": 112 * 112}),
        tokenizer=tokenizer,
        video_processor=Qwen2VLVideoProcessor(),
        chat_template=QWEN_CHAT_TEMPLATE,
    )


def make_t5_tokenizer(max_length: int = 512) -> PreTrainedTokenizerBase:
    """Make a tokenizer with a piece per printable ASCII character; others are unknown."""
    from transformers import T5Tokenizer

    pieces = ["<pad>", "</s>", "<unk>", "▁", *PRINTABLE]
    vocab = [(piece, 0.0 if index < 3 else -2.0) for index, piece in enumerate(pieces)]
    return T5Tokenizer(vocab=vocab, extra_ids=0, model_max_length=max_length)


def make_byt5_tokenizer() -> PreTrainedTokenizerBase:
    from transformers import ByT5Tokenizer

    return ByT5Tokenizer(extra_ids=0, model_max_length=512)


def make_gemma_tokenizer() -> PreTrainedTokenizerBase:
    """Make a tokenizer with a token per printable ASCII character; others are the tokens of their bytes."""
    from transformers import GemmaTokenizer

    special = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>"]
    tokens = [*special, *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *PRINTABLE[1:]]
    return GemmaTokenizer(vocab={token: index for index, token in enumerate(tokens)}, merges=[], model_max_length=8192)


def make_text_encoder(class_name: str, tokenizer: PreTrainedTokenizerBase, config: dict[str, Any]) -> PreTrainedModel:
    """Make an encoder of transformers; ``config`` lacks what the tokenizer determines."""
    import transformers

    if "vision_config" in config:
        config = add_qwen_vl_ids(tokenizer, config)
    else:
        ids = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
        known = {name: token_id for name, token_id in ids.items() if token_id is not None}
        config = {"vocab_size": len(tokenizer), **known, **config}
    model_class = getattr(transformers, class_name)
    return model_class(model_class.config_class(**config))


def add_qwen_vl_ids(tokenizer: PreTrainedTokenizerBase, config: dict[str, Any]) -> dict[str, Any]:
    """Add the ids of Qwen2.5-VL, whose text has a configuration of its own."""
    token_id = tokenizer.convert_tokens_to_ids
    ids = {"eos_token_id": token_id("<|im_end|>"), "bos_token_id": token_id("<|endoftext|>")}
    return config | {
        "text_config": {"vocab_size": len(tokenizer), **ids, **config["text_config"]},
        "image_token_id": token_id("<|image_pad|>"),
        "video_token_id": token_id("<|video_pad|>"),
        "vision_start_token_id": token_id("<|vision_start|>"),
        "vision_end_token_id": token_id("<|vision_end|>"),
    }
