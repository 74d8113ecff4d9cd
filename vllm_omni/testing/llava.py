"""Build a tiny random LLaVA-1.5 checkpoint, offline, in the layout of the published ones.

The result loads wherever the real checkpoint does: transformers' model and processor, and vLLM. Its random weights are
scaled so that each image is answered with other tokens. Its vocabulary is the words w0, w1, ...

    vllm-omni tiny llava-1.5 DIRECTORY [--seed 1]
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import nn
from transformers import (
    CLIPImageProcessor,
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    PreTrainedTokenizerFast,
)

CHAT_TEMPLATE = (
    "<s>{% for message in messages %}{% for part in message['content'] %}"
    "{{ ' <image>' if part['type'] == 'image' else ' ' + part['text'] }}"
    "{% endfor %}{% endfor %}"
)


@dataclass(frozen=True)
class Shape:
    """Sizes of a checkpoint."""

    vocab_size: int = 128
    image_size: int = 56
    patch_size: int = 14
    tower_hidden_size: int = 32
    num_tower_layers: int = 6  # the last is not computed: LLaVA reads the output of the one before
    num_tower_heads: int = 2
    hidden_size: int = 64
    num_layers: int = 2
    num_heads: int = 2
    max_position_embeddings: int = 512

    @property
    def num_image_tokens(self) -> int:
        return (self.image_size // self.patch_size) ** 2


TINY = Shape()
IMAGE, IMAGE_TOKEN = "<image>", 4
IMAGE_SIZE = TINY.image_size
NUM_IMAGE_TOKENS = TINY.num_image_tokens
NUM_TOWER_LAYERS = TINY.num_tower_layers


def build(directory: Path, shape: Shape = TINY, *, seed: int = 0) -> Path:
    """Write a checkpoint in float32 into ``directory``; the same arguments give the same bytes.

    A prompt marks the place of an image with ``<image>``. Returns ``directory``.
    """
    image_processor = CLIPImageProcessor(
        size={"shortest_edge": shape.image_size},
        crop_size={"height": shape.image_size, "width": shape.image_size},
    )
    LlavaProcessor(
        image_processor=image_processor,
        tokenizer=make_tokenizer(shape),
        patch_size=shape.patch_size,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=CHAT_TEMPLATE,
    ).save_pretrained(directory)
    config = LlavaConfig(
        vision_config=make_vision_config(shape),
        text_config=make_text_config(shape),
        image_token_index=IMAGE_TOKEN,
        vision_feature_layer=-2,
        vision_feature_select_strategy="default",
        torch_dtype="float32",
    )
    config.architectures = ["LlavaForConditionalGeneration"]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        write_weights(LlavaForConditionalGeneration(config), directory)
    (directory / "config.json").write_text(json.dumps(config.to_dict(), default=str))
    return directory


def make_tokenizer(shape: Shape, special_words: Sequence[str] = ()) -> PreTrainedTokenizerFast:
    """Make a tokenizer of the words w0, w1, ...; the special ones come last."""
    words = ["<unk>", "<s>", "</s>", "<pad>", IMAGE]
    words += [f"w{number}" for number in range(shape.vocab_size - len(words) - len(special_words))]
    words += special_words
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    )
    fast.add_special_tokens({"additional_special_tokens": [IMAGE, *special_words]})
    return fast


def make_vision_config(shape: Shape) -> CLIPVisionConfig:
    return CLIPVisionConfig(
        hidden_size=shape.tower_hidden_size,
        intermediate_size=2 * shape.tower_hidden_size,
        num_hidden_layers=shape.num_tower_layers,
        num_attention_heads=shape.num_tower_heads,
        image_size=shape.image_size,
        patch_size=shape.patch_size,
        projection_dim=shape.tower_hidden_size,
    )


def make_text_config(shape: Shape) -> LlamaConfig:
    return LlamaConfig(
        hidden_size=shape.hidden_size,
        intermediate_size=2 * shape.hidden_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_heads,
        vocab_size=shape.vocab_size,
        max_position_embeddings=shape.max_position_embeddings,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=3,
    )


def spread(weight: torch.Tensor) -> torch.Tensor:
    """Random weights wider than transformers' own, with which every image would be answered alike."""
    return torch.randn_like(weight) / weight[0].numel() ** 0.5 if weight.dim() > 1 else weight.contiguous()


def write_weights(model: nn.Module, directory: Path) -> None:
    """Write the weights under the names of published checkpoints."""
    weights = {_old_name(name): spread(weight) for name, weight in model.float().state_dict().items()}
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})


def _old_name(name: str) -> str:
    """Name of a weight in published LLaVA checkpoints, which vLLM reads."""
    name = name.removeprefix("model.")
    if name.startswith("vision_tower.") and not name.startswith("vision_tower.vision_model."):
        return name.replace("vision_tower.", "vision_tower.vision_model.", 1)
    if name.startswith("language_model."):
        return name.replace("language_model.", "language_model.model.", 1)
    return "language_model.lm_head.weight" if name == "lm_head.weight" else name
