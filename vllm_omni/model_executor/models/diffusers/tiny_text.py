"""Tokenizers and text encoders of tiny checkpoints: the real classes, built without a file.

A tokenizer knows single characters and, where a pipeline cuts off the tokens of its template by their number, the words
of that template: the cut falls where it does in the real checkpoint, and a prompt is about as many tokens as bytes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

PRINTABLE = [chr(code) for code in range(32, 127)]
# In the order of the real vocabulary.
QWEN_SPECIAL_TOKENS = (
    "<|endoftext|> <|im_start|> <|im_end|> <|object_ref_start|> <|object_ref_end|> <|box_start|> <|box_end|> "
    "<|quad_start|> <|quad_end|> <|vision_start|> <|vision_end|> <|vision_pad|> <|image_pad|> <|video_pad|>"
).split()


def make_qwen_tokenizer(template: str = "") -> PreTrainedTokenizerBase:
    """Byte-level, as Qwen2's; the words of ``template`` are one token each, as in the real vocabulary."""
    from tokenizers import pre_tokenizers
    from transformers import Qwen2Tokenizer

    characters = sorted(pre_tokenizers.ByteLevel.alphabet())
    pieces = characters
    merges: list[tuple[str, str]] = []
    if template:
        for token in QWEN_SPECIAL_TOKENS:
            template = template.replace(token, "\0")
        split = make_qwen_tokenizer().backend_tokenizer.pre_tokenizer
        words = [word for part in template.split("\0") for word, _ in split.pre_tokenize_str(part.replace("{}", "\n"))]
        merges = list(dict.fromkeys((word[:end], word[end]) for word in words for end in range(1, len(word))))
        pieces = [*characters, *dict.fromkeys(left + right for left, right in merges)]
    tokens = [*pieces, *QWEN_SPECIAL_TOKENS]
    return Qwen2Tokenizer(
        vocab={token: index for index, token in enumerate(tokens)},
        merges=merges,
        eos_token="<|im_end|>",
        extra_special_tokens=QWEN_SPECIAL_TOKENS,
        model_max_length=131072,
    )


def make_qwen_vl(tokenizer: PreTrainedTokenizerBase, hidden_size: int = 32) -> PreTrainedModel:
    """The text encoder of Qwen-Image: Qwen2.5-VL with its vision tower."""
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    text_config = {
        "vocab_size": len(tokenizer),
        "hidden_size": hidden_size,
        "intermediate_size": 2 * hidden_size,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 128000,
        # Sums to half of a head.
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 3, 3]},
        "eos_token_id": tokenizer.convert_tokens_to_ids("<|im_end|>"),
        "bos_token_id": tokenizer.convert_tokens_to_ids("<|endoftext|>"),
        "tie_word_embeddings": False,
    }
    vision_config = {
        "depth": 2,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_heads": 2,
        "out_hidden_size": hidden_size,
        "fullatt_block_indexes": [1],
    }
    ids = {
        "image_token_id": "<|image_pad|>",
        "video_token_id": "<|video_pad|>",
        "vision_start_token_id": "<|vision_start|>",
        "vision_end_token_id": "<|vision_end|>",
    }
    config = Qwen2_5_VLConfig(
        text_config=text_config,
        vision_config=vision_config,
        **{name: tokenizer.convert_tokens_to_ids(token) for name, token in ids.items()},
    )
    return Qwen2_5_VLForConditionalGeneration(config)


def make_t5_tokenizer(max_length: int = 512) -> PreTrainedTokenizerBase:
    """A piece per printable ASCII character; any other is unknown."""
    from transformers import T5Tokenizer

    pieces = ["<pad>", "</s>", "<unk>", "▁", *PRINTABLE]
    vocab = [(piece, 0.0 if index < 3 else -2.0) for index, piece in enumerate(pieces)]
    return T5Tokenizer(vocab=vocab, extra_ids=0, model_max_length=max_length)


def t5_sizes(tokenizer: PreTrainedTokenizerBase, width: int) -> dict[str, Any]:
    """What the configurations of T5 and UMT5 have in common."""
    return {
        "vocab_size": len(tokenizer),
        "d_model": width,
        "d_kv": 8,
        "d_ff": 2 * width,
        "num_layers": 2,
        "num_heads": 4,
        "feed_forward_proj": "gated-gelu",
        "dropout_rate": 0.0,
        "is_encoder_decoder": True,
        "pad_token_id": 0,
        "eos_token_id": 1,
        "decoder_start_token_id": 0,
    }


def make_umt5(tokenizer: PreTrainedTokenizerBase, width: int = 32) -> PreTrainedModel:
    from transformers import UMT5Config, UMT5EncoderModel

    return UMT5EncoderModel(UMT5Config(**t5_sizes(tokenizer, width)))
