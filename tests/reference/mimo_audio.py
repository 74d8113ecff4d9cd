"""MiMo-Audio in float32 and greedy: one request at a time, without caches, every step from the start.

The language model writes *groups*: a group is a token of text, or, where the token is ``<|empty|>``, four frames of
eight codes. Its transformers are those of ``transformers`` (Qwen2); what feeds and reads them, and the audio tokenizer,
are plain torch. Equal to the original in all cases of ``test_mimo_audio.py``, but for a defect of it:

*Sound of more than a minute.* The original encodes its pieces of 60 s as one padded batch, in which the padding reaches
the last codes of the shorter piece. Here each piece is encoded alone.
"""

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor
from transformers import Qwen2Config, Qwen2Model

NUM_MELS_OF_A_PIECE = 6000  # 60 s
INTERLEAVED = 5  # tokens, then groups of sound, in a reply of the conversation so far


# -- the language model ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Groups:
    """N positions: ``tokens[i]`` is a text token, or ``<|empty|>``, and then ``codes[i]`` are a group of sound."""

    tokens: Tensor  # [N]
    codes: Tensor  # [N, group, channels]; the channels' empty ids in groups of text

    def __add__(self, others: "Groups") -> "Groups":
        return Groups(torch.cat([self.tokens, others.tokens]), torch.cat([self.codes, others.codes]))

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, where: slice) -> "Groups":
        return Groups(self.tokens[where], self.codes[where])


@dataclass(frozen=True)
class LocalSteps:
    """A run of the local transformer, which makes the codes of one group."""

    inputs: Tensor  # [steps, L]
    hidden: Tensor  # [steps, L], after the final norm
    codes: Tensor  # [group, channels]


@dataclass(frozen=True)
class Reply:
    """N groups after a prompt of P; all of them, the one that ends the reply included."""

    groups: Groups
    rows: Tensor  # [P + N - 1, H], what enters the main model; the last group is never processed
    hidden: Tensor  # [P + N - 1, H], after the final norm; row P - 1 + k chooses token k
    logits: Tensor  # [N, vocabulary]
    local_steps: Sequence[LocalSteps]  # of the groups of sound
    codes: Tensor  # [channels, frames], as the original hands them to the decoder
    text: str  # as the original prints it


class LanguageModel:
    """The language model of a directory, with its patch encoder and local transformer."""

    def __init__(self, path: Path) -> None:
        config = json.loads((path / "config.json").read_text())
        self.tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
        self._weights = load_file(path / "model.safetensors")
        self.group, self.num_channels = config["group_size"], config["audio_channels"]
        self.empty_codes = torch.tensor(_per_channel(config["speech_zeroemb_idx"], self.num_channels))
        self._delays = _per_channel(config["delay_pattern"], self.num_channels)
        input_dim = config.get("input_local_dim") or config["local_dim"]
        self._main = self._qwen2("model.", config)
        self._local = self._qwen2("local_transformer.", config, config["local_dim"], config["local_ffn_dim"])
        self._patch = self._qwen2("input_local_transformer.", config, input_dim, 4 * input_dim)
        self._is_patch_causal = not config.get("input_full_attention")

    def _qwen2(self, prefix: str, config: dict[str, Any], dim: int | None = None, ffn_dim: int = 0) -> Qwen2Model:
        weights = {name.removeprefix(prefix): one for name, one in self._weights.items() if name.startswith(prefix)}
        if dim is not None:
            heads = config["local_attn_heads"]
            of_local = {"num_attention_heads": heads, "num_key_value_heads": heads, "head_dim": dim // heads}
            layers = 1 + max(int(name.split(".")[1]) for name in weights if name.startswith("layers."))
            of_local |= {"hidden_size": dim, "intermediate_size": ffn_dim, "num_hidden_layers": layers}
            config = {**config, **of_local, "vocab_size": 1, "pad_token_id": None}
            weights["embed_tokens.weight"] = torch.zeros(1, dim)
        model = Qwen2Model(Qwen2Config(**config)).float().eval()
        model.load_state_dict(weights)
        return model

    def token_id(self, token: str) -> int:
        found: int = self.tokenizer.token_to_id(token)
        return found

    # -- prompts

    def text(self, text: str) -> Groups:
        """The groups of a text, which is tokenized by itself."""
        return self._of_tokens(self.tokenizer.encode(text, add_special_tokens=False).ids)

    def sound(self, codes: Tensor) -> Groups:
        """The groups of codes [channels, frames]; the last frame is repeated where the last group is not full."""
        missing = -codes.shape[1] % self.group
        frames = torch.cat([codes, codes[:, -1:].expand(-1, missing)], 1).T.long()
        groups = frames.reshape(-1, self.group, self.num_channels)
        return Groups(torch.full((len(groups),), self.token_id("<|empty|>")), groups)

    def heard(self, codes: Tensor) -> Groups:
        """A sound of the user's."""
        return self.text("<|sosp|>") + self.sound(codes) + self.text("<|eosp|>")

    def spoken(self, text: str, codes: Tensor) -> Groups:
        """An earlier reply: text and sound in turns, until the longer of both ends."""
        written, sound = self.text(text), self.sound(codes)
        groups = self.text("<|sostm|>")
        for start in range(0, max(len(written), len(sound)), INTERLEAVED):
            piece = slice(start, start + INTERLEAVED)
            groups += written[piece]
            if start < len(written) <= start + INTERLEAVED:
                groups += self.text("<|eot|>")
            groups += sound[piece]
        return groups + self.text("<|eostm|>")

    def _of_tokens(self, tokens: Sequence[int]) -> Groups:
        return Groups(torch.tensor(tokens), self.empty_codes.expand(len(tokens), self.group, -1))

    # -- forward

    def rows(self, groups: Groups) -> Tensor:
        """The rows that enter the main model: embeddings of text, and the patch encoder's of sound."""
        rows = self._main.embed_tokens(groups.tokens)
        is_sound = groups.tokens == self.token_id("<|empty|>")
        if is_sound.any():
            frames = self._embed(groups.codes[is_sound])  # [sounds, group, D]
            patch = self._patch(inputs_embeds=frames, is_causal=self._is_patch_causal, use_cache=False)
            downcast = self._weights["speech_group_downcast.weight"]
            rows[is_sound] = patch.last_hidden_state.flatten(1) @ downcast.T
        return rows

    def _embed(self, codes: Tensor) -> Tensor:
        """Sum of the channels' embeddings of codes [..., channels]; that of an empty code is 0, whatever is stored."""
        embedded = [
            self._weights[f"speech_embeddings.{channel}.weight"][codes[..., channel]]
            * (codes[..., channel] != self.empty_codes[channel])[..., None]
            for channel in range(self.num_channels)
        ]
        return torch.stack(embedded).sum(0)

    def hidden(self, rows: Tensor) -> Tensor:
        hidden: Tensor = self._main(inputs_embeds=rows[None], use_cache=False).last_hidden_state[0]
        return hidden

    def local_steps(self, hidden: Tensor) -> LocalSteps:
        """Make the codes of a group of sound: channel c, delayed by delay[c], has its frame f at step f + delay[c]."""
        codes = self.empty_codes.repeat(self.group, 1)
        inputs = (self._weights["hidden_states_downcast.weight"] @ hidden)[None]
        made = torch.empty(0)
        for step in range(self.group + max(self._delays)):
            made = self._local(inputs_embeds=inputs[None], use_cache=False).last_hidden_state[0]
            chosen = self.empty_codes.clone()
            for channel, delay in enumerate(self._delays):
                if 0 <= step - delay < self.group:
                    logits = self._weights[f"local_transformer_lm_heads.{channel}.weight"] @ made[-1]
                    logits[self.empty_codes[channel]] = -math.inf
                    chosen[channel] = codes[step - delay, channel] = logits.argmax()
            if step < self.group + max(self._delays) - 1:
                inputs = torch.cat([inputs, self._to_local(self._embed(chosen))[None]])
        return LocalSteps(inputs, made, codes)

    def _to_local(self, embedded: Tensor) -> Tensor:
        project = self._weights.get("speech_embeddings_to_local.weight")
        return embedded if project is None else project @ embedded

    # -- generation

    @torch.inference_mode()
    def generate(self, prompt: Groups, max_new_groups: int, stop_token_ids: Sequence[int]) -> Reply:
        """Reply until a stop token, or for so many groups."""
        groups, logits, steps = prompt, [], []
        while True:
            rows = self.rows(groups)
            hidden = self.hidden(rows)
            logits.append(self._weights["lm_head.weight"] @ hidden[-1])
            token = int(logits[-1].argmax())
            group = self._of_tokens([token])
            if token == self.token_id("<|empty|>"):
                steps.append(self.local_steps(hidden[-1]))
                group = Groups(group.tokens, steps[-1].codes[None])
            groups += group
            if token in stop_token_ids or len(groups) == len(prompt) + max_new_groups:
                break
        made = groups[len(prompt) :]
        return Reply(made, rows, hidden, torch.stack(logits), steps, self._spoken_codes(made), self._written(made))

    def _spoken_codes(self, made: Groups) -> Tensor:
        """The frames of a reply; the original drops the last group, also where it is no stop."""
        tokens = made.tokens.tolist()[:-1]
        start, end = self.token_id("<|sostm|>"), self.token_id("<|eostm|>")
        first = tokens.index(start) if start in tokens else 0
        last = tokens.index(end) if end in tokens else len(tokens)
        codes = made.codes[first:last]
        return codes[codes[:, 0, 0] != self.empty_codes[0]].flatten(0, 1).T

    def _written(self, made: Groups) -> str:
        text: str = self.tokenizer.decode(made.tokens.tolist()[:-1], skip_special_tokens=False)
        for token in ("<|empty|>", "<|eot|>", "<|eostm|>"):
            text = text.replace(token, "")
        return text


def probabilities(
    logits: Tensor, temperature: float | None, top_k: int | None, top_p: float | None, without: int
) -> Tensor:
    """The distribution from which the original samples a code: the id ``without`` is taken out at the end."""
    logits = logits / temperature if temperature else logits
    if top_k:
        logits = logits.where(logits >= logits.topk(top_k).values[..., -1:], -math.inf)
    if top_p:
        ordered, order = logits.sort(descending=True)
        before = ordered.softmax(-1).cumsum(-1).roll(1, -1)
        before[..., 0] = 0.0
        logits = logits.where((before <= top_p).gather(-1, order.argsort(-1)), -math.inf)
    logits = logits.index_fill(-1, torch.tensor(without), -math.inf)
    return logits.softmax(-1)


def _per_channel(pattern: str | int, num_channels: int) -> list[int]:
    """ "0-1-2": a number for each channel; one number is that of all."""
    numbers = [int(one) for one in str(pattern).split("-")]
    return numbers if len(numbers) > 1 else numbers * num_channels


# -- the audio tokenizer -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Decoded:
    """N codes on their way to 960 N samples."""

    quantized: Tensor  # [N, D]
    upsampled: Tensor  # [2 N, D]
    hidden: Tensor  # [2 N, D], after the final norm
    mels: Tensor  # [4 N, mels]
    vocoder_hidden: Tensor  # [4 N, V], after the final norm
    wave: Tensor  # [960 N]


class AudioTokenizer:
    """The audio tokenizer of a directory: waves to codes, 25 frames a second, and back."""

    def __init__(self, path: Path) -> None:
        self.config = json.loads((path / "config.json").read_text())
        self._weights = load_file(path / "model.safetensors")

    # -- waves to codes

    @torch.inference_mode()
    def mels(self, wave: Tensor) -> Tensor:
        """Logarithmic mels [1 + samples // hop, mels] of samples at 24 kHz."""
        config = self.config
        window = torch.hann_window(config["window_size"])
        spectrum = torch.stft(wave, config["nfft"], config["hop_length"], window=window, return_complex=True)
        return (spectrum.abs().T @ _mel_filters(config)).clip(min=1e-7).log()

    @torch.inference_mode()
    def features(self, mels: Tensor) -> Tensor:
        """What is quantized: [a quarter of the mels, D]."""
        config = self.config
        x = F.gelu(self._conv("encoder.conv1", mels, padding=1))
        x = F.gelu(self._conv("encoder.conv2", x, padding=1, stride=config["stride_size"]))
        layers = list(self._layers("encoder", x, config["encoder_attention_heads"], config["encoder_attn_window_size"]))
        x = self._norm("encoder.layer_norm", layers[-1] + layers[config["encoder_skip_layer_id"] - 1])
        x = F.pad(x, (0, 0, 0, len(x) % config["avg_pooler"]))
        x = F.gelu(self._conv("encoder.down_sample_layer.0", x, stride=config["avg_pooler"]))
        return self._norm("encoder.down_sample_norm", x)

    @torch.inference_mode()
    def quantize(self, features: Tensor) -> tuple[Tensor, Tensor]:
        """Codes [quantizers, n], each of what the ones before have left, and the sum of their vectors [n, D]."""
        codes, rest = [], features
        for index in range(self.config["num_quantizers"]):
            table = self._codebook(index)
            distances = rest.square().sum(1, keepdim=True) - 2 * rest @ table.T + table.square().sum(1)
            codes.append(distances.argmin(1))
            rest = rest - table[codes[-1]]
        return torch.stack(codes), features - rest

    def encode(self, wave: Tensor) -> Tensor:
        """Codes [quantizers, frames] of samples at 24 kHz, minute by minute."""
        pieces = self.mels(wave).split(NUM_MELS_OF_A_PIECE)
        return torch.cat([self.quantize(self.features(piece))[0] for piece in pieces], 1)

    # -- codes to waves

    @torch.inference_mode()
    def decode(self, codes: Tensor) -> Decoded:
        """Decode codes [channels, N] in one piece."""
        config = self.config
        quantized = torch.stack([self._codebook(index)[row.long()] for index, row in enumerate(codes)]).sum(0)
        upsampled = self._upsample("decoder.dconv1", quantized, config["avg_pooler"])
        heads, is_causal = config["decoder_attention_heads"], config["decoder_causal"]
        *_, x = self._layers("decoder", upsampled, heads, config["decoder_attn_window_size"], is_causal)
        hidden = self._norm("decoder.layer_norm", x)
        mels = self._upsample("decoder.dconv2", hidden, config["decoder_stride_size"])
        x = mels @ self._weights["decoder.vocoder.embeddings.weight"].T
        heads, window = config["vocoder_attention_heads"], config["vocoder_attn_window_size"]
        *_, x = self._layers("decoder.vocoder", x, heads, window)
        vocoder_hidden = self._norm("decoder.vocoder.layer_norm", x)
        return Decoded(quantized, upsampled, hidden, mels, vocoder_hidden, self._wave(vocoder_hidden))

    def _wave(self, hidden: Tensor) -> Tensor:
        """The inverse STFT of one frame for each row, whose windows reach (window - hop) / 2 beyond both ends."""
        config = self.config
        magnitude, phase = self._linear("decoder.vocoder.head.out", hidden).chunk(2, 1)
        spectrum = torch.polar(magnitude.exp().clip(max=100), phase)
        window, hop = self._weights["decoder.vocoder.head.istft.window"], config["hop_length"]
        frames = torch.fft.irfft(spectrum, config["nfft"]) * window
        length = (len(frames) - 1) * hop + len(window)
        wave, envelope = torch.zeros(length), torch.zeros(length)
        for index, frame in enumerate(frames):
            reach = slice(index * hop, index * hop + len(window))
            wave[reach] += frame
            envelope[reach] += window.square()
        cut = (len(window) - hop) // 2
        return wave[cut : length - cut] / envelope[cut : length - cut]

    # -- layers; x is [time, channels]

    def _layers(
        self, name: str, x: Tensor, num_heads: int, window: Sequence[int], is_causal: bool = False
    ) -> Iterator[Tensor]:
        """The output of each layer of a stack."""
        is_seen = _attention_mask(len(x), window, is_causal)
        index = 0
        while f"{name}.layers.{index}.fc1.weight" in self._weights:
            layer = f"{name}.layers.{index}"
            normed = self._norm(f"{layer}.self_attn_layer_norm", x)
            x = x + self._attend(f"{layer}.self_attn", normed, num_heads, is_seen)
            normed = self._norm(f"{layer}.final_layer_norm", x)
            x = x + self._linear(f"{layer}.fc2", F.gelu(self._linear(f"{layer}.fc1", normed)))
            yield x
            index += 1

    def _attend(self, name: str, x: Tensor, num_heads: int, is_seen: Tensor) -> Tensor:
        query, key, value = (
            self._linear(f"{name}.{one}_proj", x).unflatten(1, (num_heads, -1)).transpose(0, 1) for one in "qkv"
        )
        theta = self.config["rope_theta"]
        weights = _rotate(query, theta) @ _rotate(key, theta).transpose(1, 2) / math.sqrt(query.shape[-1])
        mixed = weights.masked_fill(~is_seen, -math.inf).softmax(-1) @ value
        return self._linear(f"{name}.out_proj", mixed.transpose(0, 1).flatten(1))

    def _linear(self, name: str, x: Tensor) -> Tensor:
        return F.linear(x, self._weights[f"{name}.weight"], self._weights.get(f"{name}.bias"))

    def _norm(self, name: str, x: Tensor) -> Tensor:
        return F.layer_norm(x, x.shape[1:], self._weights[f"{name}.weight"], self._weights[f"{name}.bias"])

    def _conv(self, name: str, x: Tensor, *, padding: int = 0, stride: int = 1) -> Tensor:
        weight, bias = self._weights[f"{name}.weight"], self._weights.get(f"{name}.bias")
        return F.conv1d(x.T[None], weight, bias, stride, padding)[0].T

    def _upsample(self, name: str, x: Tensor, stride: int) -> Tensor:
        """A transposed convolution, normalized over channels and time together before its end is cut off."""
        weight, bias = self._weights[f"{name}.conv.weight"], self._weights[f"{name}.conv.bias"]
        x = F.conv_transpose1d(x.T[None], weight, bias, stride)
        x = F.group_norm(x, 1, self._weights[f"{name}.norm.weight"], self._weights[f"{name}.norm.bias"])
        return x[0, :, : x.shape[2] - (weight.shape[2] - stride)].T

    def _codebook(self, index: int) -> Tensor:
        return self._weights[f"encoder.quantizer.vq.layers.{index}._codebook.embed"]


def _attention_mask(length: int, window: Sequence[int], is_causal: bool) -> Tensor:
    """[query, key]: which keys a query sees: so many to the left and to the right, -1 for all."""
    left, right = (length if reach < 0 else reach for reach in window)
    place = torch.arange(length)
    ahead = place[None] - place[:, None]  # of the key
    return (ahead >= -left) & (ahead <= (0 if is_causal else right))


def _rotate(x: Tensor, theta: float) -> Tensor:
    """Rotary position embedding of [heads, time, dim], whose halves are the two coordinates."""
    half = x.shape[-1] // 2
    frequencies = theta ** (-torch.arange(half) / half)
    angles = torch.arange(x.shape[1])[:, None] * frequencies
    first, second = x[..., :half], x[..., half:]
    return torch.cat(
        [first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()], dim=-1
    )


def _mel_filters(config: dict[str, Any]) -> Tensor:
    """Triangles [bins, mels], equally wide in HTK's mels, each 1 at its peak."""

    def to_mel(hertz: float) -> float:
        return 2595 * math.log10(1 + hertz / 700)

    highest = config["fmax"] or config["sampling_rate"] / 2
    edges = torch.linspace(to_mel(config["fmin"]), to_mel(highest), config["n_mels"] + 2)
    hertz = 700 * (10 ** (edges / 2595) - 1)
    bins = torch.linspace(0, config["sampling_rate"] // 2, config["nfft"] // 2 + 1)[:, None]
    rising = (bins - hertz[:-2]) / (hertz[1:-1] - hertz[:-2])
    falling = (hertz[2:] - bins) / (hertz[2:] - hertz[1:-1])
    return torch.minimum(rising, falling).clip(min=0)
