"""The audio tokenizer of MiMo-Audio: sound to codes, 25 frames per second, and back. Always in float32.

    mels -> convolutions -> transformer -> pooling -> residual quantizer -> codes
    codes -> sum of their rows -> upsampling -> causal transformer -> upsampling -> vocoder: spectrum -> inverse STFT

Rows of a batch have the same length: a group norm runs over channels and time, so padding would change the sound.
Names of parameters are the checkpoint's.

From: XiaomiMiMo/MiMo-Audio-Tokenizer; vLLM has its encoder for MiMo-V2-Omni, which needs FlashAttention.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional

from vllm_omni.errors import ConfigError

DIRECTORY = "audio_tokenizer"
REPOSITORY = "XiaomiMiMo/MiMo-Audio-Tokenizer"
SAMPLE_RATE = 24000
SAMPLES_PER_FRAME = 960
MELS_PER_PIECE = 6000  # 60 s: longer sound is encoded, and decoded, piece by piece
FRAMES_PER_PIECE = 1500
QUERIES_PER_BLOCK = 512  # of attention to a window, whose mask is made for so many at a time


def codec_directory(model: str) -> Path:
    """The directory of a checkpoint's audio tokenizer.

    Raises:
        ConfigError: the model is no directory, or has none.
    """
    path = Path(model).expanduser() / DIRECTORY
    if not (path / "config.json").is_file():
        raise ConfigError(
            f"model {model!r}: it needs its audio tokenizer in the directory {path}: download both repositories, "
            f"{REPOSITORY} into {DIRECTORY!r} of the other one's directory"
        )
    return path


def read_codec_config(directory: Path) -> dict[str, Any]:
    """``config.json`` of the audio tokenizer.

    Raises:
        ConfigError: it cannot be read, or a setting that changes what is computed is not supported.
    """
    path = directory / "config.json"
    try:
        config: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as exc:
        raise ConfigError(f"{path}: {exc}") from exc
    expected = {
        "sampling_rate": SAMPLE_RATE, "avg_pooler": 2, "stride_size": 2, "decoder_stride_size": 2, "hop_length": 240,
        "activation_function": "gelu", "ln_type": "LayerNorm", "position_embedding_type": "rope",
        "vocoder_padding": "same", "encoder_causal": False, "decoder_causal": True,
    }  # fmt: skip
    for name, value in expected.items():
        if config.get(name, value) != value:
            raise ConfigError(f"{path}: {name} = {config[name]!r}: only {value!r} is supported")
    return config


def load_encoder(config: Mapping[str, Any], num_channels: int, directory: Path) -> AudioEncoder:
    encoder = AudioEncoder(config, num_channels)
    _load(encoder, directory, {"encoder.": ""})
    return encoder.float().eval()


def load_decoder(config: Mapping[str, Any], num_channels: int, directory: Path) -> AudioDecoder:
    decoder = AudioDecoder(config, num_channels)
    _load(decoder, directory, {"decoder.": "", "encoder.quantizer.": "quantizer."})
    return decoder.float().eval()


def _load(module: nn.Module, directory: Path, prefixes: Mapping[str, str]) -> None:
    """Load the tensors of one half.

    Args:
        prefixes: of names in the checkpoint -> of the module's.
    """
    known, loaded = module.state_dict(), {}
    for name, tensor in load_file(directory / "model.safetensors").items():
        for theirs, ours in prefixes.items():
            if name.startswith(theirs) and (own := ours + name.removeprefix(theirs)) in known:
                loaded[own] = tensor.float()
    module.load_state_dict(loaded, strict=True)


# -- sound to mels -----------------------------------------------------------------------------------------------------


def log_mels(wave: Tensor, config: Mapping[str, Any]) -> Tensor:
    """Logarithmic mels of samples at 24 kHz: [samples] float32 -> [1 + samples // hop, n_mels].

    Raises:
        ValueError: too few samples for one window.
    """
    least = config["nfft"] // 2 + 1
    if len(wave) < least:
        raise ValueError(f"the audio has {len(wave)} samples at 24 kHz: it needs at least {least}")
    window = torch.hann_window(config["window_size"])
    spectrum = torch.stft(wave, config["nfft"], config["hop_length"], window=window, return_complex=True)
    return (spectrum.abs().T @ mel_filters(config)).clip(min=1e-7).log()


def mel_filters(config: Mapping[str, Any]) -> Tensor:
    """Triangles [bins, n_mels], equally wide in HTK's mels, each 1 at its peak."""

    def to_mel(hertz: float) -> float:
        return 2595 * math.log10(1 + hertz / 700)

    highest = config.get("fmax") or SAMPLE_RATE / 2
    edges = torch.linspace(to_mel(config["fmin"]), to_mel(highest), config["n_mels"] + 2)
    hertz = 700 * (10 ** (edges / 2595) - 1)
    bins = torch.linspace(0, SAMPLE_RATE // 2, config["nfft"] // 2 + 1)[:, None]
    rising = (bins - hertz[:-2]) / (hertz[1:-1] - hertz[:-2])
    falling = (hertz[2:] - bins) / (hertz[2:] - hertz[1:-1])
    return torch.minimum(rising, falling).clip(min=0)


def num_frames(num_mels: int) -> int:
    """How many frames of codes the encoder makes of mels."""
    whole, rest = divmod(num_mels, MELS_PER_PIECE)
    return whole * FRAMES_PER_PIECE + math.ceil(math.ceil(rest / 2) / 2)


# -- layers; x is [B, time, channels] ----------------------------------------------------------------------------------


class CodecAttention(nn.Module):
    """Rotary attention: of all positions, of those up to each one, or of a window around it.

    Args:
        window: positions to the left and to the right; -1: all of them.
    """

    def __init__(self, size: int, num_heads: int, theta: float, window: Sequence[int], *, is_causal: bool) -> None:
        super().__init__()
        self.num_heads, self.theta, self.is_causal = num_heads, theta, is_causal
        self.left, self.right = window[0], 0 if is_causal else window[1]
        self.q_proj = nn.Linear(size, size)
        self.k_proj = nn.Linear(size, size, bias=False)
        self.v_proj = nn.Linear(size, size)
        self.out_proj = nn.Linear(size, size)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (
            projection(x).unflatten(2, (self.num_heads, -1)).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        y = self._attend(_rotate(query, self.theta), _rotate(key, self.theta), value)
        return self.out_proj(y.transpose(1, 2).flatten(2))

    def _attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if self.left < 0 and (self.right < 0 or self.is_causal):
            return functional.scaled_dot_product_attention(query, key, value, is_causal=self.is_causal)
        length = query.shape[2]
        left, right = (length if reach < 0 else reach for reach in (self.left, self.right))
        blocks = []
        for start in range(0, length, QUERIES_PER_BLOCK):
            end = min(start + QUERIES_PER_BLOCK, length)
            first, last = max(start - left, 0), min(end + right, length)
            ahead = torch.arange(first, last, device=query.device) - torch.arange(
                start, end, device=query.device
            ).unsqueeze(1)
            mask = (ahead >= -left) & (ahead <= right)
            keys, values = key[:, :, first:last], value[:, :, first:last]
            blocks.append(functional.scaled_dot_product_attention(query[:, :, start:end], keys, values, mask))
        return torch.cat(blocks, dim=2)


class CodecLayer(nn.Module):
    """Pre-norm attention and MLP."""

    def __init__(
        self, size: int, ffn_size: int, num_heads: int, theta: float, window: Sequence[int], *, is_causal: bool
    ) -> None:
        super().__init__()
        self.self_attn_layer_norm = nn.LayerNorm(size)
        self.self_attn = CodecAttention(size, num_heads, theta, window, is_causal=is_causal)
        self.final_layer_norm = nn.LayerNorm(size)
        self.fc1 = nn.Linear(size, ffn_size)
        self.fc2 = nn.Linear(ffn_size, size)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.self_attn(self.self_attn_layer_norm(x))
        return x + self.fc2(functional.gelu(self.fc1(self.final_layer_norm(x))))


def _layers(config: Mapping[str, Any], name: str) -> nn.ModuleList:
    """The layers of the encoder or of the decoder, which are alike."""
    return nn.ModuleList(
        CodecLayer(
            config["d_model"],
            config[f"{name}_ffn_dim"],
            config[f"{name}_attention_heads"],
            config["rope_theta"],
            config[f"{name}_attn_window_size"],
            is_causal=config[f"{name}_causal"],
        )
        for _ in range(config[f"{name}_layers"])
    )


def _rotate(x: Tensor, theta: float) -> Tensor:
    """Rotary position embedding of [B, heads, time, dim], whose halves are the two coordinates."""
    half = x.shape[-1] // 2
    frequencies = theta ** (-torch.arange(half, device=x.device) / half)
    angles = torch.arange(x.shape[2], device=x.device)[:, None] * frequencies
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()), -1)


# -- mels to codes -----------------------------------------------------------------------------------------------------


class Codebook(nn.Module):
    def __init__(self, num_codes: int, size: int) -> None:
        super().__init__()
        self.embed = nn.Parameter(torch.zeros(num_codes, size))


class Quantizer(nn.Module):
    """Residual vector quantization with the first tables of the checkpoint."""

    def __init__(self, config: Mapping[str, Any], num_channels: int) -> None:
        super().__init__()
        sizes = config["codebook_size"]
        sizes = [*sizes, *[sizes[-1]] * (num_channels - len(sizes))]
        layers = (nn.ModuleDict({"_codebook": Codebook(one, config["d_model"])}) for one in sizes[:num_channels])
        self.vq = nn.ModuleDict({"layers": nn.ModuleList(layers)})

    @property
    def tables(self) -> list[Tensor]:
        return [module.embed for module in self.vq.modules() if isinstance(module, Codebook)]

    def encode(self, features: Tensor) -> Tensor:
        """[n, d_model] -> [n, channels]: the row nearest to what the tables before have left."""
        codes, rest = [], features
        for table in self.tables:
            distances = rest.square().sum(1, keepdim=True) - 2 * rest @ table.T + table.square().sum(1)
            codes.append(distances.argmin(1))
            rest = rest - table[codes[-1]]
        return torch.stack(codes, dim=1)

    def decode(self, codes: Tensor) -> Tensor:
        """[B, n, channels] -> [B, n, d_model]."""
        rows = [table[codes[..., channel]] for channel, table in enumerate(self.tables)]
        return torch.stack(rows).sum(0)


class AudioEncoder(nn.Module):
    """Mels -> codes of the language model's channels."""

    def __init__(self, config: Mapping[str, Any], num_channels: int) -> None:
        super().__init__()
        size = config["d_model"]
        self.conv1 = nn.Conv1d(config["n_mels"], size, config["kernel_size"], padding=1)
        self.conv2 = nn.Conv1d(size, size, config["kernel_size"], config["stride_size"], padding=1)
        self.layers = _layers(config, "encoder")
        self.skip_layer = config["encoder_skip_layer_id"] - 1
        self.layer_norm = nn.LayerNorm(size)
        pooler = config["avg_pooler"]
        self.down_sample_layer = nn.Sequential(nn.Conv1d(size, size, pooler, pooler, bias=False), nn.GELU())
        self.down_sample_norm = nn.LayerNorm(size)
        self.quantizer = Quantizer(config, num_channels)

    @torch.inference_mode()
    def encode(self, mels: Tensor) -> Tensor:
        """Codes of one sound, [num_mels, n_mels] -> [num_frames, channels]: each minute is encoded alone.

        The original encodes minutes as one padded batch, in which padding reaches codes of the last, shorter one.
        """
        mels = mels.to(self.conv1.weight)
        return torch.cat([self.quantizer.encode(self._features(piece)) for piece in mels.split(MELS_PER_PIECE)])

    def _features(self, mels: Tensor) -> Tensor:
        """[n, n_mels] -> [a quarter of n, d_model]."""
        x = functional.gelu(self.conv2(functional.gelu(self.conv1(mels.T[None])))).transpose(1, 2)
        skipped = x
        for index, layer in enumerate(self.layers):
            x = layer(x)
            if index == self.skip_layer:
                skipped = x
        x = self.layer_norm(x + skipped)
        x = functional.pad(x, (0, 0, 0, x.shape[1] % 2)).transpose(1, 2)
        return self.down_sample_norm(self.down_sample_layer(x).transpose(1, 2))[0]


# -- codes to sound ----------------------------------------------------------------------------------------------------


class Upsample(nn.Module):
    """A transposed convolution, normalized over channels and time together before its end is cut off."""

    def __init__(self, size: int, out_size: int, kernel_size: int, stride: int) -> None:
        super().__init__()
        self.conv = nn.ConvTranspose1d(size, out_size, kernel_size, stride)
        self.norm = nn.GroupNorm(1, out_size)
        self.num_trimmed = kernel_size - stride

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.conv(x.transpose(1, 2)))
        return x[..., : x.shape[2] - self.num_trimmed].transpose(1, 2)


class InverseSTFT(nn.Module):
    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        self.num_bins, self.hop = config["nfft"], config["hop_length"]
        self.window = nn.Parameter(torch.hann_window(config["window_size"]))

    def forward(self, spectrum: Tensor) -> Tensor:
        """[B, n, bins] -> [B, n * hop]: windows reach (window - hop) / 2 beyond both ends, which are cut."""
        frames = torch.fft.irfft(spectrum, self.num_bins) * self.window
        size, num = len(self.window), spectrum.shape[1]
        length = (num - 1) * self.hop + size

        def overlap_add(columns: Tensor) -> Tensor:
            return functional.fold(columns, (1, length), (1, size), stride=(1, self.hop))[:, 0, 0]

        wave = overlap_add(frames.transpose(1, 2))
        envelope = overlap_add(self.window.square()[None, :, None].expand(1, size, num))
        cut = (size - self.hop) // 2
        return wave[:, cut : length - cut] / envelope[:, cut : length - cut]


class Vocoder(nn.Module):
    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        size = config["vocoder_dim"]
        self.embeddings = nn.Linear(config["n_mels"], size, bias=False)
        self.layers = nn.ModuleList(
            CodecLayer(
                size,
                config["vocoder_intermediate_dim"],
                config["vocoder_attention_heads"],
                config["rope_theta"],
                config["vocoder_attn_window_size"],
                is_causal=False,
            )
            for _ in range(config["vocoder_num_layers"])
        )
        self.layer_norm = nn.LayerNorm(size)
        head = {"out": nn.Linear(size, config["nfft"] + 2), "istft": InverseSTFT(config)}
        self.head = nn.ModuleDict(head)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embeddings(x)
        for layer in self.layers:
            x = layer(x)
        magnitude, phase = self.head["out"](self.layer_norm(x)).chunk(2, dim=-1)
        return self.head["istft"](torch.polar(magnitude.exp().clip(max=100), phase))


class AudioDecoder(nn.Module):
    """Codes -> samples at 24 kHz."""

    def __init__(self, config: Mapping[str, Any], num_channels: int) -> None:
        super().__init__()
        size = config["d_model"]
        self.quantizer = Quantizer(config, num_channels)
        self.dconv1 = Upsample(size, size, config["avg_pooler"], config["avg_pooler"])
        self.layers = _layers(config, "decoder")
        self.layer_norm = nn.LayerNorm(size)
        self.dconv2 = Upsample(size, config["n_mels"], config["decoder_kernel_size"], config["decoder_stride_size"])
        self.vocoder = Vocoder(config)

    @torch.inference_mode()
    def forward(self, codes: Tensor) -> Tensor:
        """Decode sounds of the same length in one piece: [B, n, channels] int64, n > 0 -> [B, 960 n]."""
        x = self.dconv1(self.quantizer.decode(codes))
        for layer in self.layers:
            x = layer(x)
        return self.vocoder(self.dconv2(self.layer_norm(x)))
