"""A plain reference of HunyuanImage-3: one request, float32, no paging; guidance is a second sequence.

Written from facts about the original (``hunyuan_image_3/README.md`` of the golden data) and proved equal to it in
``test_hunyuan_image_3.py``. Tensors have the rows of one sequence, [n, width], where nothing else is said.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional as F
from transformers import Siglip2ImageProcessor, Siglip2VisionConfig, Siglip2VisionModel

NUM_RATIOS = 33
NUM_GROUPS = 32  # of the group norms
PIXELS_PER_TOKEN = 16  # in each direction


class Grid(NamedTuple):
    """An image's rows and columns of tokens."""

    rows: int
    columns: int

    @property
    def num_tokens(self) -> int:
        return self.rows * self.columns


@dataclass
class Given:
    """A given image: its latents, [z, rows, columns], and what the vision transformer sees."""

    ratio: int
    latents: Tensor
    patches: Tensor  # [patches, 768], padded
    mask: Tensor  # [patches]: which are not
    view: Grid


@dataclass
class Row:
    """Tokens of one row, and the images among them."""

    ids: list[int] = field(default_factory=list)
    is_masked: list[bool] = field(default_factory=list)  # tokens in whose place the unconditional row has <cfg>
    grids: list[tuple[int, Grid]] = field(default_factory=list)  # first token of each image, and its grid
    spans: list[tuple[int, int]] = field(default_factory=list)  # tokens that see each other
    given: list[tuple[int, int, Given]] = field(default_factory=list)  # first tokens of its latents and of its view
    canvas: tuple[int, Grid] | None = None  # first token of the latents that are denoised

    def add(self, ids: Iterable[int], *, is_masked: bool = False) -> None:
        ids = list(ids)
        self.ids += ids
        self.is_masked += [is_masked] * len(ids)


class Denoised(NamedTuple):
    """The steps of a picture, by step, [steps, z, rows, columns] where nothing else is said."""

    timesteps: Tensor  # [steps]
    predictions: Tensor  # [steps, 2, z, rows, columns]: with and without the prompt
    velocities: Tensor
    latents: Tensor  # [steps + 1, z, rows, columns]


class Reference:
    """HunyuanImage-3 with its weights in float32."""

    def __init__(self, path: Path) -> None:
        self.config = json.loads((path / "config.json").read_text())
        self.weights = {name: one.float() for name, one in load_file(path / "model.safetensors").items()}
        self.tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
        self.num_layers, self.hidden_size = self.config["num_hidden_layers"], self.config["hidden_size"]
        self.num_heads, self.num_kv_heads = (self.config[f"num_{name}_heads"] for name in ("attention", "key_value"))
        self.head_size, self.eps = self.config["attention_head_dim"], self.config["rms_norm_eps"]
        self.base_size = self.config["image_base_size"]
        self.bos, self.eos = self.id_of("<|startoftext|>"), self.id_of("<|endoftext|>")
        self.first_ratio = self.id_of("<img_ratio_0>")
        self.vit = self._vision_model()

    def id_of(self, token: str) -> int:
        found = self.tokenizer.token_to_id(token)
        assert found is not None, token
        return found

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def _vision_model(self) -> Siglip2VisionModel:
        sizes = ["hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_patches"]
        names = [*sizes, "patch_size", "hidden_act", "layer_norm_eps", "vision_use_head"]
        config = Siglip2VisionConfig(**{name: self.config["vit"][name] for name in names})
        config._attn_implementation = "sdpa"
        model = Siglip2VisionModel(config).eval()
        prefix = "vision_model."
        weights = {name.removeprefix(prefix): one for name, one in self.weights.items() if name.startswith(prefix)}
        inner = {name.removeprefix(prefix) for name in model.state_dict()}
        assert inner == set(weights), inner ^ set(weights)
        is_nested = next(iter(model.state_dict())).startswith(prefix)
        model.load_state_dict({f"{prefix * is_nested}{name}": one for name, one in weights.items()})
        return model

    # -- weights ------------------------------------------------------------------------------------------------------

    def linear(self, name: str, x: Tensor) -> Tensor:
        return F.linear(x, self.weights[f"{name}.weight"], self.weights.get(f"{name}.bias"))

    def rms_norm(self, name: str, x: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], self.weights[f"{name}.weight"], self.eps)

    def group_norm(self, name: str, x: Tensor, eps: float) -> Tensor:
        return F.group_norm(x, NUM_GROUPS, self.weights[f"{name}.weight"], self.weights[f"{name}.bias"], eps)

    def conv(self, name: str, x: Tensor) -> Tensor:
        weight = self.weights[f"{name}.weight"]
        convolve = F.conv2d if weight.dim() == 4 else F.conv3d
        return convolve(x, weight, self.weights[f"{name}.bias"], padding=weight.shape[-1] // 2)

    # -- sizes --------------------------------------------------------------------------------------------------------

    def size_of(self, ratio: int) -> tuple[int, int]:
        """Height and width of a ratio's pictures, in pixels: from wide to tall."""
        step, index = self.base_size // 16, ratio - NUM_RATIOS // 2
        sides = (self.base_size + step * one for one in (index, -index))
        height, width = (min(max(side, self.base_size // 2), 2 * self.base_size) for side in sides)
        return height, width

    def ratio_of(self, height: int, width: int) -> int:
        """The ratio nearest to a size's own."""
        ratios = [tall / wide for tall, wide in map(self.size_of, range(NUM_RATIOS))]
        return int(np.argmin([abs(one - height / width) for one in ratios]))

    def grid_of(self, ratio: int) -> Grid:
        return Grid(*(side // PIXELS_PER_TOKEN for side in self.size_of(ratio)))

    # -- sequences ----------------------------------------------------------------------------------------------------

    def start(self) -> Row:
        return Row([self.bos], [False])

    def add_text(self, sequence: Row, text: str, *, is_masked: bool = False) -> None:
        """Append a section, which is tokenized by itself."""
        sequence.add(self.encode(text), is_masked=is_masked)

    def _add_image_start(self, sequence: Row, ratio: int) -> None:
        names = ("<boi>", f"<img_size_{self.base_size}>", f"<img_ratio_{ratio}>", "<timestep>")
        sequence.add(self.id_of(name) for name in names)

    def add_canvas(self, sequence: Row, ratio: int) -> None:
        """Append the picture that is denoised."""
        self._add_image_start(sequence, ratio)
        start, grid = len(sequence.ids), self.grid_of(ratio)
        sequence.canvas = start, grid
        sequence.grids.append((start, grid))
        sequence.spans.append((start, start + grid.num_tokens))
        sequence.add([self.id_of("<img>")] * grid.num_tokens + [self.id_of("<eoi>")])

    def add_given(self, sequence: Row, given: Given) -> None:
        """Append a given image: its latents, then its view."""
        self._add_image_start(sequence, given.ratio)
        start, grid = len(sequence.ids), Grid(*given.latents.shape[1:])
        view, num_patches = start + grid.num_tokens + 1, len(given.patches)
        sequence.grids += [(start, grid), (view, given.view)]
        sequence.spans.append((start, view + num_patches))
        sequence.given.append((start, view, given))
        image = self.id_of("<img>")
        sequence.add([image] * grid.num_tokens + [self.id_of("<joint_img_sep>")] + [image] * num_patches)
        sequence.add([self.id_of("<eoi>")])

    def unconditional(self, sequence: Row) -> list[int]:
        masked = self.id_of("<cfg>")
        return [masked if one else token for token, one in zip(sequence.ids, sequence.is_masked, strict=True)]

    # -- images -------------------------------------------------------------------------------------------------------

    def read_image(self, image: Image.Image, noise: Tensor | None) -> Given:
        """Prepare a given image.

        Args:
            noise: the draw of the auto-encoder's posterior, [z, rows, columns]; None: its mean.
        """
        ratio = self.ratio_of(image.height, image.width)
        height, width = (side * PIXELS_PER_TOKEN for side in self.grid_of(ratio))
        image = fitted(image.convert("RGB"), (height, width))
        mean, std = self.encode_pixels(pixels_of(image))
        latents = (mean if noise is None else mean + std * noise) * self.config["vae"]["scaling_factor"]
        names = ("patch_size", "max_num_patches", "image_mean", "image_std", "resample")
        processor = Siglip2ImageProcessor(**{name: self.config["vit_processor"][name] for name in names})
        seen = processor(images=image, return_tensors="pt")
        view = Grid(*seen["spatial_shapes"][0].tolist())
        return Given(ratio, latents, seen["pixel_values"][0], seen["pixel_attention_mask"][0], view)

    def encode_view(self, given: Given) -> Tensor:
        """[patches, hidden size], with the padding."""
        shapes = torch.tensor([given.view])
        seen = self.vit(given.patches[None], given.mask[None], shapes).last_hidden_state[0]
        inner = F.gelu(self.linear("vision_aligner.layers.0", seen))
        return self.linear("vision_aligner.layers.2", inner)

    def _vae_block(self, name: str, x: Tensor) -> Tensor:
        inner = self.conv(f"{name}.conv1", F.silu(self.group_norm(f"{name}.norm1", x, 1e-6)))
        inner = self.conv(f"{name}.conv2", F.silu(self.group_norm(f"{name}.norm2", inner, 1e-6)))
        return inner + (self.conv(f"{name}.nin_shortcut", x) if f"{name}.nin_shortcut.weight" in self.weights else x)

    def _vae_middle(self, name: str, x: Tensor) -> Tensor:
        x = self._vae_block(f"{name}.block_1", x)
        normed = self.group_norm(f"{name}.attn_1.norm", x, 1e-6)
        q, k, v = (self.conv(f"{name}.attn_1.{one}", normed).flatten(2).mT for one in "qkv")
        attended = F.scaled_dot_product_attention(q[:, None], k[:, None], v[:, None])[:, 0].mT.reshape(x.shape)
        return self._vae_block(f"{name}.block_2", x + self.conv(f"{name}.attn_1.proj_out", attended))

    def _num_frames_of(self, level: int) -> int:
        """By which factor a level of the decoder multiplies frames; the encoder divides them in the last ones."""
        vae = self.config["vae"]
        return 2 if level < int(math.log2(vae["ffactor_temporal"])) else 1

    def _num_moves(self) -> int:
        return int(math.log2(self.config["vae"]["ffactor_spatial"]))

    def encode_pixels(self, pixels: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation of an image's latents, [z, rows, columns]; not scaled."""
        vae, num_moves = self.config["vae"], self._num_moves()
        x = pixels[None, :, None].expand(-1, -1, vae["ffactor_temporal"], -1, -1)
        x = self.conv("vae.encoder.conv_in", x)
        for level in range(len(vae["block_out_channels"])):
            for block in range(vae["layers_per_block"]):
                x = self._vae_block(f"vae.encoder.down.{level}.block.{block}", x)
            if level < num_moves:
                frames = self._num_frames_of(num_moves - 1 - level)
                made = packed(self.conv(f"vae.encoder.down.{level}.downsample.conv", x), frames)
                x = made + mean_of_groups(packed(x, frames), made.shape[1])
        x = self._vae_middle("vae.encoder.mid", x)
        made = self.conv("vae.encoder.conv_out", F.silu(self.group_norm("vae.encoder.norm_out", x, 1e-6)))
        mean, log_variance = (made + mean_of_groups(x, made.shape[1]))[0, :, 0].chunk(2)
        return mean, torch.exp(0.5 * log_variance.clamp(-30, 20))

    def decode_latents(self, latents: Tensor) -> Tensor:
        """[z, rows, columns] -> [3, H, W], from -1 to 1."""
        vae, num_moves = self.config["vae"], self._num_moves()
        z = (latents / vae["scaling_factor"])[None, :, None]
        x = self.conv("vae.decoder.conv_in", z)
        x = x + z.repeat_interleave(x.shape[1] // z.shape[1], dim=1)
        x = self._vae_middle("vae.decoder.mid", x)
        for level in range(len(vae["block_out_channels"])):
            for block in range(vae["layers_per_block"] + 1):
                x = self._vae_block(f"vae.decoder.up.{level}.block.{block}", x)
            if level < num_moves:
                frames = self._num_frames_of(level)
                made = self.conv(f"vae.decoder.up.{level}.upsample.conv", x)
                x = unpacked(made, frames) + unpacked(x.repeat_interleave(made.shape[1] // x.shape[1], dim=1), frames)
        return self.conv("vae.decoder.conv_out", F.silu(self.group_norm("vae.decoder.norm_out", x, 1e-6)))[0, :, -1]

    @staticmethod
    def bytes_of(pixels: Tensor) -> np.ndarray:
        """[3, H, W] from -1 to 1 -> [H, W, 3] uint8, rounded."""
        made: np.ndarray = ((pixels / 2 + 0.5).clamp(0, 1) * 255).round().permute(1, 2, 0).to(torch.uint8).numpy()
        return made

    # -- latents as tokens --------------------------------------------------------------------------------------------

    def embed_time(self, name: str, time: Tensor) -> Tensor:
        half = self.weights[f"{name}.mlp.0.weight"].shape[1] // 2
        angles = time * torch.exp(-math.log(10000) * torch.arange(half, dtype=torch.float32) / half)
        wave = torch.cat([angles.cos(), angles.sin()])
        return self.linear(f"{name}.mlp.2", F.gelu(self.linear(f"{name}.mlp.0", wave)))

    def _residual_block(self, name: str, x: Tensor, time: Tensor) -> Tensor:
        """A block whose scale and shift are of the time: [1, channels, rows, columns]."""
        inner = self.conv(f"{name}.in_layers.2", F.silu(self.group_norm(f"{name}.in_layers.0", x, 1e-5)))
        scale, shift = self.linear(f"{name}.emb_layers.1", F.silu(time))[None, :, None, None].chunk(2, dim=1)
        inner = self.group_norm(f"{name}.out_layers.0", inner, 1e-5) * (1 + scale) + shift
        return self.conv(f"{name}.skip_connection", x) + self.conv(f"{name}.out_layers.3", F.silu(inner))

    def embed_latents(self, latents: Tensor, time: Tensor) -> Tensor:
        """[z, rows, columns] -> [tokens, hidden size]."""
        x = self.conv("patch_embed.model.0", latents[None])
        x = self._residual_block("patch_embed.model.1", x, self.embed_time("time_embed", time))
        return x[0].flatten(1).T

    def predict(self, hidden: Tensor, grid: Grid, time: Tensor) -> Tensor:
        """The velocity, [z, rows, columns], from hidden states of the latents."""
        x = hidden.T.unflatten(1, grid)[None]
        x = self._residual_block("final_layer.model.0", x, self.embed_time("time_embed_2", time))
        return self.conv("final_layer.model.1.2", F.silu(self.group_norm("final_layer.model.1.0", x, 1e-5)))[0]

    # -- the language model -------------------------------------------------------------------------------------------

    def embed(self, sequence: Row, ids: Sequence[int], latents: Tensor | None = None, time: float = 0) -> Tensor:
        """The input of the first layer."""
        rows = self.weights["model.wte.weight"][torch.tensor(ids)].clone()
        images = [(start, given.latents, torch.zeros(())) for start, _, given in sequence.given]
        if latents is not None:
            assert sequence.canvas is not None
            images.append((sequence.canvas[0], latents, torch.as_tensor(time)))
        for start, image, when in images:
            rows[start - 1] = self.embed_time("timestep_emb", when)
            made = self.embed_latents(image, when)
            rows[start : start + len(made)] = made
        for _, view, given in sequence.given:
            rows[view : view + len(given.patches)] = self.encode_view(given)
        return rows

    def positions(self, sequence: Row) -> Tensor:
        """Row and column of each token for the rope, [n, 2] int64."""
        made = torch.arange(len(sequence.ids))[:, None].expand(-1, 2).clone()
        for start, grid in sequence.grids:
            rows, columns = grid
            corner = torch.tensor([start + (grid.num_tokens - side) / 2 for side in grid])
            cells = torch.cartesian_prod(torch.arange(rows), torch.arange(columns))
            made[start : start + grid.num_tokens] = (corner + cells).long()
        return made

    def mask(self, sequence: Row) -> Tensor:
        """Which tokens each one sees, [n, n] bool."""
        num_tokens = len(sequence.ids)
        sees = torch.ones(num_tokens, num_tokens, dtype=torch.bool).tril()
        for start, end in sequence.spans:
            sees[start:end, start:end] = True
        return sees

    def rotations(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines, [n, head size]: even frequencies are of the row, odd ones of the column."""
        half = self.head_size // 2
        rates = 1.0 / self.config["rope_theta"] ** (torch.arange(half, dtype=torch.float32) / half)
        angles = positions.float().repeat(1, half // 2) * rates
        return torch.cat([angles, angles], dim=1).cos(), torch.cat([angles, angles], dim=1).sin()

    def forward(self, embeds: Tensor, positions: Tensor, sees: Tensor) -> Tensor:
        """Hidden states behind the last layer, without the final norm."""
        cos, sin = (one[:, None] for one in self.rotations(positions))
        x, group = embeds, self.num_heads // self.num_kv_heads

        def rotated(heads: Tensor) -> Tensor:
            one, two = heads.chunk(2, dim=-1)
            return heads * cos + torch.cat([-two, one], dim=-1) * sin

        for index in range(self.num_layers):
            layer = f"model.layers.{index}"
            normed = self.rms_norm(f"{layer}.input_layernorm", x)
            qkv = self.linear(f"{layer}.self_attn.qkv_proj", normed)
            qkv = qkv.reshape(len(x), self.num_kv_heads, group + 2, self.head_size)
            q, k, v = qkv[:, :, :group].flatten(1, 2), qkv[:, :, group], qkv[:, :, group + 1]
            q = self.rms_norm(f"{layer}.self_attn.query_layernorm", rotated(q))
            k = self.rms_norm(f"{layer}.self_attn.key_layernorm", rotated(k))
            q, k, v = (one.transpose(0, 1) for one in (q, k, v))
            attended = F.scaled_dot_product_attention(q, k, v, attn_mask=sees, enable_gqa=True)
            x = x + self.linear(f"{layer}.self_attn.o_proj", attended.transpose(0, 1).flatten(1))
            x = x + self.mixture(f"{layer}.mlp", self.rms_norm(f"{layer}.post_attention_layernorm", x))
        return x

    def router_logits(self, name: str, x: Tensor) -> Tensor:
        return self.linear(f"{name}.gate.wg", x)

    def mixture(self, name: str, x: Tensor) -> Tensor:
        """The shared expert and, of each token, the best few of the others."""
        weights, experts = self.router_logits(name, x).softmax(-1).topk(_each(self.config["moe_topk"]))
        weights = weights / weights.sum(-1, keepdim=True)
        made = self.mlp(f"{name}.shared_mlp", x)
        for expert in range(self.config["num_experts"]):
            rows, place = (experts == expert).nonzero(as_tuple=True)
            made[rows] += weights[rows, place, None] * self.mlp(f"{name}.experts.{expert}", x[rows])
        return made

    def mlp(self, name: str, x: Tensor) -> Tensor:
        up, gate = self.linear(f"{name}.gate_and_up_proj", x).chunk(2, dim=-1)
        return self.linear(f"{name}.down_proj", up * F.silu(gate))

    def logits(self, hidden: Tensor) -> Tensor:
        return self.linear("lm_head", self.rms_norm("model.ln_f", hidden))

    # -- text ---------------------------------------------------------------------------------------------------------

    def answer(self, sequence: Row, stop_ids: Sequence[int], max_tokens: int) -> tuple[list[int], Tensor]:
        """Greedy ids behind a sequence, and the logits of each, [n, vocabulary]. A stop id is the last one."""
        grown = Row(list(sequence.ids), grids=sequence.grids, spans=sequence.spans, given=sequence.given)
        ids: list[int] = []
        logits = []
        while len(ids) < max_tokens and not (ids and ids[-1] in stop_ids):
            hidden = self.forward(self.embed(grown, grown.ids), self.positions(grown), self.mask(grown))
            logits.append(self.logits(hidden[-1]))
            ids.append(int(logits[-1].argmax()))
            grown.ids.append(ids[-1])
        return ids, torch.stack(logits)

    def choose_ratio(self, sequence: Row) -> int:
        """The ratio that the model writes behind ``<img_size_...>``; what is no ratio means a square."""
        (token,), _ = self.answer(sequence, (), 1)
        ratio = token - self.first_ratio
        return ratio if 0 <= ratio < NUM_RATIOS else NUM_RATIOS // 2

    # -- pictures -----------------------------------------------------------------------------------------------------

    def times(self, num_steps: int, shift: float) -> Tensor:
        """Of the steps and of their end, from 1 to 0: [num_steps + 1]."""
        even = torch.linspace(1, 0, num_steps + 1)
        return shift * even / (1 + (shift - 1) * even)

    def denoise(self, sequence: Row, noise: Tensor, *, num_steps: int, shift: float, scale: float) -> Denoised:
        """Euler steps from noise, [z, rows, columns], to a picture.

        Args:
            scale: how far the picture follows its prompt; 1: no guidance.
        """
        assert sequence.canvas is not None
        start, grid = sequence.canvas
        positions, sees, times = self.positions(sequence), self.mask(sequence), self.times(num_steps, shift)
        latents, velocities, predictions = [noise], [], []
        for now, after in pairwise(times):
            rows, time = [], now * 1000
            for ids in (sequence.ids, self.unconditional(sequence)):
                hidden = self.forward(self.embed(sequence, ids, latents[-1], time), positions, sees)
                rows.append(self.predict(hidden[start : start + grid.num_tokens], grid, time))
            predictions.append(torch.stack(rows))
            velocities.append(rows[1] + scale * (rows[0] - rows[1]))
            latents.append(latents[-1] + velocities[-1] * (after - now))
        return Denoised(times[:-1] * 1000, torch.stack(predictions), torch.stack(velocities), torch.stack(latents))


def packed(x: Tensor, frames: int) -> Tensor:
    """[1, c, f * frames, 2 h, 2 w] -> [1, frames * 4 * c, f, h, w]; the channel is the last part of the new one."""
    _, c, f, h, w = x.shape
    made = x.reshape(c, f // frames, frames, h // 2, 2, w // 2, 2).permute(2, 4, 6, 0, 1, 3, 5)
    return made.reshape(1, -1, f // frames, h // 2, w // 2)


def unpacked(x: Tensor, frames: int) -> Tensor:
    """The reverse of ``packed``."""
    f, h, w = x.shape[2:]
    made = x.reshape(frames, 2, 2, -1, f, h, w).permute(3, 4, 0, 5, 1, 6, 2)
    return made.reshape(1, -1, f * frames, 2 * h, 2 * w)


def mean_of_groups(x: Tensor, num_channels: int) -> Tensor:
    """Channels that stand together, averaged: [1, c, ...] -> [1, num_channels, ...]."""
    return x.unflatten(1, (num_channels, -1)).mean(2)


def fitted(image: Image.Image, size: tuple[int, int]) -> Image.Image:
    """Resized so that it covers a height and width, and cropped at its middle."""
    height, width = size
    scale = max(height / image.height, width / image.width)
    if image.size != (width, height):
        image = image.resize((round(image.width * scale), round(image.height * scale)), Image.Resampling.LANCZOS)
    left, top = (image.width - width) // 2, (image.height - height) // 2
    return image.crop((left, top, left + width, top + height))


def pixels_of(image: Image.Image) -> Tensor:
    """[3, H, W] from -1 to 1."""
    values = torch.from_numpy(np.array(image)).permute(2, 0, 1).float() / 255
    return (values - 0.5) / 0.5


def _each(value: Any) -> int:
    """A setting that the configuration has once, or for each layer."""
    found: int = value[0] if isinstance(value, list) else value
    return found
