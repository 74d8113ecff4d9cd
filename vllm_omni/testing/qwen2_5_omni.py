"""Build a tiny random Qwen2.5-Omni checkpoint, offline, in the layout of the real one.

The result loads wherever the real checkpoint does: transformers' model and processor, and vLLM's thinker. Its random
weights are scaled so that a greedy reply is printable, varied and as long as its limit, the talker generates hundreds
of codes, and a wrong hidden state or position changes the result.

    python -m vllm_omni.testing.qwen2_5_omni DIRECTORY [--variant wide] [--seed 1]
"""

import argparse
import math
from pathlib import Path

import torch
from torch import Tensor
from transformers import GenerationConfig, Qwen2_5OmniForConditionalGeneration

from vllm_omni.testing.qwen2_5_omni_config import make_config
from vllm_omni.testing.qwen2_5_omni_processor import SYSTEM_PROMPT, make_processor
from vllm_omni.testing.qwen2_5_omni_shape import VARIANTS, TinyShape
from vllm_omni.testing.variants import find_variant

__all__ = ["SYSTEM_PROMPT", "VARIANTS", "TinyShape", "build", "randomize"]

PRINTABLE = slice(32, 127)
STRIDE = 37  # coprime to 95 printable bytes and to the variants' numbers of codes
SUCCESSOR_BIAS = 4.0
LOGIT_SCALE = 2.0
# Gains over fan-in scaling. Sharp attention selects single tokens of the context, so that a step depends on more than
# its input; the output gains are for a stage of two layers.
ATTENTION_GAIN = 2.5
# Lower in the thinker: its hidden states are compared between implementations, and sharpness amplifies rounding.
THINKER_ATTENTION_GAIN = 1.25
ATTENTION_OUTPUT_GAIN = 2.0
MLP_OUTPUT_GAIN = 0.2


def build(
    path: Path, *, seed: int = 0, variant: str = "base", dtype: str = "float32", shape: TinyShape | None = None
) -> Path:
    """Write a checkpoint into the directory ``path``; the same arguments give the same bytes.

    Args:
        seed: of the weights and of the speakers' voices.
        variant: a key of ``VARIANTS``; unused when ``shape`` is given.
        dtype: of the weights in the file, ``float32`` or ``bfloat16``.

    Returns:
        ``path``.

    Raises:
        ValueError: the variant is unknown.
    """
    shape = shape or find_variant(VARIANTS, variant)
    path.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng(devices=[]):  # constructing consumes random numbers of the global generator
        model = Qwen2_5OmniForConditionalGeneration(make_config(shape))
    randomize(model, shape, generator)
    end_ids = [shape.token_id("<|im_end|>"), shape.token_id("<|endoftext|>")]
    model.generation_config = GenerationConfig(eos_token_id=end_ids, pad_token_id=shape.token_id("<|endoftext|>"))
    model.to(getattr(torch, dtype)).save_pretrained(path)
    model.config.architectures = ["Qwen2_5OmniModel"]  # as in the real file, unlike the class's name
    model.config.save_pretrained(path)
    torch.save(make_speakers(shape, generator), path / "spk_dict.pt")
    make_processor(shape).save_pretrained(path)
    return path


@torch.no_grad()
def randomize(model: Qwen2_5OmniForConditionalGeneration, shape: TinyShape, generator: torch.Generator) -> None:
    """Overwrite every parameter: transformers' standard deviation of 0.02 would make all outputs nearly equal."""
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

    # Replies are limited to printable ASCII, so that they can be read and have no special tokens.
    printable = torch.zeros(shape.vocab_size, 1)
    printable[PRINTABLE] = 1.0
    printable[shape.token_id("<|im_end|>")] = LOGIT_SCALE * shape.thinker_end_scale
    embeddings = model.thinker.model.embed_tokens.weight
    if shape.tie_word_embeddings:
        # Prompts and talker read the same rows; small ones are never sampled and still carry information.
        embeddings.mul_(printable.clamp(min=0.2))
        # With gains of one sign, every token would be its own most likely successor.
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
    model.token2wav.code2wav_bigvgan_model.conv_post.weight.mul_(shape.loudness)


def get_gain(name: str, shape: TinyShape) -> float:
    """Gain over fan-in scaling of the decoder's matrix of this name; 1 for other modules."""
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
    """Bias an output head, [V, H], from each id towards the one ``STRIDE`` above it, modulo V.

    A random decoder soon repeats two or three ids. With the bias it walks through the vocabulary, and attention, which
    reads the history, still decides most of the steps.

    Args:
        head: changed in place.
        inputs: [V, H], the input of the residual stream for each id.
    """
    directions = inputs / inputs.norm(dim=-1, keepdim=True)
    head.mul_(LOGIT_SCALE).add_(SUCCESSOR_BIAS * LOGIT_SCALE * directions.roll(STRIDE, dims=0))


def make_speakers(shape: TinyShape, generator: torch.Generator) -> dict[str, dict[str, int | Tensor]]:
    return {
        name: {
            "bos_token": bos_id,
            "cond": torch.randn(1, shape.speaker_dim, generator=generator),
            "ref_mel": torch.randn(1, shape.reference_frames, shape.mel_dim, generator=generator),
        }
        for name, bos_id in shape.speaker_ids.items()
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Build a tiny random Qwen2.5-Omni checkpoint.")
    parser.add_argument("path", type=Path)
    parser.add_argument("--variant", choices=sorted(VARIANTS), default="base")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    arguments = parser.parse_args()
    print(build(arguments.path, seed=arguments.seed, variant=arguments.variant, dtype=arguments.dtype))
