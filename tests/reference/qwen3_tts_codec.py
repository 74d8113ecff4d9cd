"""The 12 Hz codec decoder of Qwen3-TTS in plain float32: the whole sequence at once, every layer as its formula.

From: the description of the decoder in the checkpoints' code (package ``qwen-tts`` 0.1.1), written anew.
"""

import torch
from torch.nn import functional


def decode_whole(weights, config, codes):
    """Codes [1, num_quantizers, n] to samples [1, n * samples_per_frame]."""
    rows = quantized(weights, "quantizer.rvq_first", codes[:, :1])
    rows = rows + quantized(weights, "quantizer.rvq_rest", codes[:, 1:])
    x = transform(weights, config, conv(weights, "pre_conv", rows))
    for index, ratio in enumerate(config.upsampling_ratios):
        x = upsample(weights, f"upsample.{index}.0", x, ratio)
        x = convnext(weights, f"upsample.{index}.1", x)
    x = conv(weights, "decoder.0", x)
    for index, rate in enumerate(config.upsample_rates, 1):
        name = f"decoder.{index}.block"
        x = upsample(weights, f"{name}.1", snake(weights, f"{name}.0", x), rate)
        for unit, dilation in enumerate((1, 3, 9), 2):
            y = conv(weights, f"{name}.{unit}.conv1", snake(weights, f"{name}.{unit}.act1", x), dilation)
            x = x + conv(weights, f"{name}.{unit}.conv2", snake(weights, f"{name}.{unit}.act2", y))
    last = len(config.upsample_rates) + 1
    return conv(weights, f"decoder.{last + 1}", snake(weights, f"decoder.{last}", x))[:, 0].clamp(-1, 1)


def quantized(weights, name, codes):
    rows = 0
    for group in range(codes.shape[1]):
        book = f"{name}.vq.layers.{group}._codebook"
        table = weights[f"{book}.embedding_sum"] / weights[f"{book}.cluster_usage"].clamp(min=1e-5)[:, None]
        rows = rows + table[codes[:, group]]
    return functional.conv1d(rows.transpose(1, 2), weights[f"{name}.output_proj.weight"])


def conv(weights, name, x, dilation=1):
    weight = weights[f"{name}.conv.weight"]
    padded = functional.pad(x, ((weight.shape[-1] - 1) * dilation, 0))
    groups = x.shape[1] // weight.shape[1]
    return functional.conv1d(padded, weight, weights[f"{name}.conv.bias"], dilation=dilation, groups=groups)


def upsample(weights, name, x, stride):
    y = functional.conv_transpose1d(x, weights[f"{name}.conv.weight"], weights[f"{name}.conv.bias"], stride=stride)
    return y[..., : x.shape[-1] * stride]


def snake(weights, name, x):
    alpha, beta = (weights[f"{name}.{one}"].exp()[:, None] for one in ("alpha", "beta"))
    return x + (x * alpha).sin() ** 2 / (beta + 1e-9)


def convnext(weights, name, x):
    y = conv(weights, f"{name}.dwconv", x).transpose(1, 2)
    y = functional.layer_norm(y, y.shape[-1:], weights[f"{name}.norm.weight"], weights[f"{name}.norm.bias"], 1e-6)
    y = functional.gelu(linear(weights, f"{name}.pwconv1", y))
    return x + (weights[f"{name}.gamma"] * linear(weights, f"{name}.pwconv2", y)).transpose(1, 2)


def linear(weights, name, x):
    return functional.linear(x, weights[f"{name}.weight"], weights.get(f"{name}.bias"))


def transform(weights, config, x):
    x = linear(weights, "pre_transformer.input_proj", x.transpose(1, 2))
    positions = torch.arange(x.shape[1])
    distance = positions[:, None] - positions
    mask = (distance >= 0) & (distance < config.sliding_window)
    dim = config.attention_dim
    angles = positions[:, None] / config.rope_theta ** (torch.arange(0, dim, 2) / dim)
    angles = torch.cat((angles, angles), dim=-1)

    def norm(name, y):
        return y * (y.pow(2).mean(-1, keepdim=True) + config.rms_norm_eps).rsqrt() * weights[f"{name}.weight"]

    def heads(name, y):
        return linear(weights, name, y).unflatten(-1, (-1, dim)).transpose(1, 2)

    def rotate(y):
        half = dim // 2
        return y * angles.cos() + torch.cat((-y[..., half:], y[..., :half]), dim=-1) * angles.sin()

    for index in range(config.num_hidden_layers):
        name = f"pre_transformer.layers.{index}"
        y = norm(f"{name}.input_layernorm", x)
        query, key, value = (heads(f"{name}.self_attn.{one}_proj", y) for one in "qkv")
        repeats = query.shape[1] // key.shape[1]
        key, value = (one.repeat_interleave(repeats, dim=1) for one in (rotate(key), value))
        scores = rotate(query) @ key.transpose(2, 3) * dim**-0.5
        y = scores.masked_fill(~mask, float("-inf")).softmax(-1) @ value
        y = linear(weights, f"{name}.self_attn.o_proj", y.transpose(1, 2).flatten(2))
        x = x + weights[f"{name}.self_attn_layer_scale.scale"] * y
        y = norm(f"{name}.post_attention_layernorm", x)
        gate, up = (linear(weights, f"{name}.mlp.{one}_proj", y) for one in ("gate", "up"))
        y = linear(weights, f"{name}.mlp.down_proj", functional.silu(gate) * up)
        x = x + weights[f"{name}.mlp_layer_scale.scale"] * y
    return linear(weights, "pre_transformer.output_proj", norm("pre_transformer.norm", x)).transpose(1, 2)
