"""Build a tiny random Qwen3-Omni checkpoint, offline, in the layout of the real one (30B-A3B Instruct).

It loads with transformers and with vLLM's thinker. Weights are scaled so that greedy replies are printable and greedy
codes vary and come to an end, and a wrong hidden state or position changes the result.

    python -m vllm_omni.testing.qwen3_omni DIRECTORY [--variant apart] [--seed 1]
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import torch
from torch import Tensor
from transformers import GenerationConfig, Qwen3OmniMoeForConditionalGeneration
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import Qwen3OmniMoeCode2Wav

from vllm_omni.testing.qwen3_omni_config import VARIANTS, OmniShape, make_config, make_processor
from vllm_omni.testing.variants import find_variant

__all__ = ["VARIANTS", "OmniShape", "build", "randomize"]

PRINTABLE = "".join(chr(code) for code in range(33, 127))
STRIDE = 37  # coprime to the number of printable bytes and to the variants' numbers of codes
SUCCESSOR_BIAS = 4.0
HEAD_SCALE = 2.0
END_SCALE = 7.0  # of the end code's logit, so that speech ends after some frames
# Sharp attention selects single tokens of the context, so that a step depends on more than its input. Queries and keys
# are normalized, so the gain is that of the queries' norm.
QUERY_GAIN = 1.8
# Of the thinker it must not drown the last token, or replies repeat two or three ids.
OUTPUT_GAINS = {
    "thinker": {"o_proj": 0.5, "down_proj": 0.4},
    "talker": {"o_proj": 1.0, "down_proj": 0.4},
}
PEAK = 0.35  # of the samples


def build(path: Path, *, seed: int = 0, variant: str = "base", shape: OmniShape | None = None) -> Path:
    """Write a checkpoint into the directory ``path``; the same arguments give the same bytes.

    Raises:
        ValueError: the variant is unknown.
    """
    shape = shape or find_variant(VARIANTS, variant)
    path.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(seed)
    processor = make_processor(shape)
    with torch.random.fork_rng(devices=[]):  # constructing consumes random numbers of the global generator
        model = Qwen3OmniMoeForConditionalGeneration(make_config(shape))
    printable = [processor.tokenizer.convert_tokens_to_ids(character) for character in PRINTABLE]
    randomize(model, shape, printable, generator)
    end_ids = [shape.token_id("<|im_end|>"), shape.token_id("<|endoftext|>")]
    model.generation_config = GenerationConfig(eos_token_id=end_ids, pad_token_id=shape.token_id("<|endoftext|>"))
    model.save_pretrained(path)
    processor.save_pretrained(path)
    return path


@torch.no_grad()
def randomize(
    model: Qwen3OmniMoeForConditionalGeneration, shape: OmniShape, printable: list[int], generator: torch.Generator
) -> None:
    """Overwrite every parameter: transformers' standard deviation of 0.02 would make all outputs nearly equal."""
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        is_embedding = "embed_tokens" in name or "codec_embedding" in name or name.endswith("code_embedding.weight")
        if "norm" in name and name.endswith("weight") and parameter.ndim == 1:
            parameter.copy_((1 + noise * 0.1) * (QUERY_GAIN if "q_norm" in name else 1.0))
        elif name.endswith("layer_scale.scale"):
            parameter.fill_(0.5)  # 0.01 at the start of a training, which would hide the transformer
        elif name.endswith("gamma"):
            parameter.fill_(0.3)
        elif parameter.ndim == 1:
            parameter.copy_(noise * 0.1)
        elif is_embedding:
            parameter.copy_(noise * 0.5)
        else:  # experts are [experts, out, in]
            fan_in = parameter.shape[-1] if "experts" in name else math.prod(parameter.shape[1:])
            parameter.copy_(noise * get_gain(name) / math.sqrt(fan_in))

    # Replies are printable, so that they can be read and have no special tokens.
    head, embeddings = model.thinker.lm_head.weight, model.thinker.model.embed_tokens.weight
    kept = head[printable].clone()
    head.zero_()
    head[printable] = favour_successors(kept, embeddings[printable])

    if shape.has_talker:
        scale_speech(model, shape, generator)


def scale_speech(model: Qwen3OmniMoeForConditionalGeneration, shape: OmniShape, generator: torch.Generator) -> None:
    """Scale the heads of the talker and the vocoder."""
    talker = model.talker
    codes = talker.model.codec_embedding.weight[: shape.num_codes]
    end = talker.codec_head.weight[shape.codec_id("eos")].clone() * HEAD_SCALE * END_SCALE
    talker.codec_head.weight[: shape.num_codes] = favour_successors(talker.codec_head.weight[: shape.num_codes], codes)
    talker.codec_head.weight[shape.codec_id("eos")] = end
    for linear in talker.code_predictor.lm_head:
        linear.weight.mul_(2 * HEAD_SCALE)
    scale_samples(model.code2wav, shape, generator)


def get_gain(name: str) -> float:
    """Gain over fan-in scaling of the matrix of this name."""
    stage, _, rest = name.partition(".")
    if stage == "code2wav":
        return 0.8 if rest.startswith("decoder") else 1.0
    if not rest.startswith("model.layers."):
        return 1.0
    return next((gain for part, gain in OUTPUT_GAINS[stage].items() if part in name), 1.0)


def favour_successors(head: Tensor, inputs: Tensor) -> Tensor:
    """Bias an output head, [V, H], from each id towards the one ``STRIDE`` above it, modulo V.

    A random decoder soon repeats two or three ids. With the bias it walks through the vocabulary, and attention, which
    reads the history, still decides most of the steps.
    """
    directions = inputs / inputs.norm(dim=-1, keepdim=True)
    return HEAD_SCALE * (head + SUCCESSOR_BIAS * directions.roll(STRIDE, dims=0))


def scale_samples(code2wav: Qwen3OmniMoeCode2Wav, shape: OmniShape, generator: torch.Generator) -> None:
    """Scale the last convolution so that no sample is clamped, which would hide differences."""
    last = code2wav.decoder[-1].conv
    last.bias.zero_()
    last.weight.mul_(1e-3)
    codes = torch.randint(shape.num_codes, (1, shape.num_groups, 30), generator=generator)
    last.weight.mul_(PEAK / code2wav(codes).abs().max())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Build a tiny random Qwen3-Omni checkpoint.")
    parser.add_argument("path", type=Path)
    parser.add_argument("--variant", choices=sorted(VARIANTS), default="base")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    print(build(arguments.path, seed=arguments.seed, variant=arguments.variant))
