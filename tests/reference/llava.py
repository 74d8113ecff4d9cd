"""A tiny LLaVA-1.5 with random weights that answers an image with tokens of its own."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    CLIPImageProcessor,
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    PreTrainedTokenizerFast,
)

VOCAB_SIZE = 128
IMAGE_SIZE, PATCH_SIZE = 56, 14
NUM_IMAGE_TOKENS = (IMAGE_SIZE // PATCH_SIZE) ** 2
CHAT_TEMPLATE = (
    "<s>{% for message in messages %}{% for part in message['content'] %}"
    "{{ ' <image>' if part['type'] == 'image' else ' ' + part['text'] }}"
    "{% endfor %}{% endfor %}"
)
NUM_TOWER_LAYERS = 6  # of which the last is not computed: LLaVA takes what the one before it gives


def build(directory: Path) -> Path:
    """Write the checkpoint; words are w0, w1, ... and an image's place is ``<image>``."""
    words = ["<unk>", "<s>", "</s>", "<pad>", "<image>"]
    words += [f"w{number}" for number in range(VOCAB_SIZE - len(words))]
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    )
    fast.add_special_tokens({"additional_special_tokens": ["<image>"]})
    image_processor = CLIPImageProcessor(
        size={"shortest_edge": IMAGE_SIZE}, crop_size={"height": IMAGE_SIZE, "width": IMAGE_SIZE}
    )
    LlavaProcessor(
        image_processor=image_processor,
        tokenizer=fast,
        patch_size=PATCH_SIZE,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=CHAT_TEMPLATE,
    ).save_pretrained(directory)
    config = LlavaConfig(
        vision_config=CLIPVisionConfig(
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=NUM_TOWER_LAYERS,
            num_attention_heads=2,
            image_size=IMAGE_SIZE,
            patch_size=PATCH_SIZE,
            projection_dim=32,
        ),
        text_config=LlamaConfig(
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            vocab_size=VOCAB_SIZE,
            max_position_embeddings=512,
            bos_token_id=1,
            eos_token_id=2,
            pad_token_id=3,
        ),
        image_token_index=4,
        vision_feature_layer=-2,
        vision_feature_select_strategy="default",
        torch_dtype="float32",
    )
    config.architectures = ["LlavaForConditionalGeneration"]
    torch.manual_seed(0)
    model = LlavaForConditionalGeneration(config).float()
    weights = {}
    for name, weight in model.state_dict().items():
        if weight.dim() > 1:
            # Transformers' own spread is so small that every image would be answered alike.
            weight = torch.randn_like(weight) / weight[0].numel() ** 0.5
        weights[_old_name(name)] = weight.contiguous()
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps(config.to_dict(), default=str))
    return directory


def _old_name(name: str) -> str:
    """As published LLaVA checkpoints, and so vLLM, name it."""
    name = name.removeprefix("model.")
    if name.startswith("vision_tower.") and not name.startswith("vision_tower.vision_model."):
        return name.replace("vision_tower.", "vision_tower.vision_model.", 1)
    if name.startswith("language_model."):
        return name.replace("language_model.", "language_model.model.", 1)
    return "language_model.lm_head.weight" if name == "lm_head.weight" else name
