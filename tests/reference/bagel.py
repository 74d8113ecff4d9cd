"""A plain reference of BAGEL: one request, one segment at a time, float32, no batching and no paging.

Written from facts about the original (``bagel/README.md`` of the golden data) and proved equal to it in
``test_bagel.py``. Tensors have the rows of one sequence, [n, width].
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from diffusers import AutoencoderKL
from diffusers.loaders.single_file_utils import convert_ldm_vae_checkpoint
from PIL import Image
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional as F


class Guidance(NamedTuple):
    """The parameters of a picture's guidance."""

    text_scale: float = 4.0
    image_scale: float = 1.5
    interval: tuple[float, float] = (0.4, 1.0)  # guided are steps with low < t <= high
    renorm_min: float = 0.0
    renorm: str = "global"  # or "channel", "text_channel"


@dataclass
class Context:
    """What a branch has read: keys and values of each layer, and the next rope position, which images raise by one."""

    keys: list[Tensor]  # of each layer: [n, KV heads, head size]
    values: list[Tensor]
    position: int = 0
    hidden: list[Tensor] = field(default_factory=list)  # of each segment, behind the final norm

    @property
    def num_tokens(self) -> int:
        return len(self.keys[0])


class Canvas(NamedTuple):
    """The steps of a picture. By step, [steps, tokens, 64] where nothing else is said."""

    timesteps: Tensor  # [steps]
    velocities: Tensor
    latents: Tensor  # [steps + 1, tokens, 64]: before each step and at the end


class Reference:
    """BAGEL with its weights in float32.

    Args:
        path: a checkpoint in the layout of the published files; ``transforms.json``, or ``image_sizes`` of its
            configuration, has the sizes of images, which the original has in its code, and ``vae_config`` the shape of
            the VAE.
    """

    def __init__(self, path: Path) -> None:
        self.config = json.loads((path / "config.json").read_text())
        self.weights = {name: one.float() for name, one in load_file(path / "ema.safetensors").items()}
        self.tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
        self.transforms = read_sizes(path, self.config)
        self.vae = load_vae(path, self.config["vae_config"])
        llm = self.config["llm_config"]
        self.num_layers, self.num_heads = llm["num_hidden_layers"], llm["num_attention_heads"]
        self.num_kv_heads, self.head_size = llm["num_key_value_heads"], llm["hidden_size"] // llm["num_attention_heads"]
        self.eps, self.rope_theta = llm["rms_norm_eps"], llm["rope_theta"]
        self.bos, self.eos = (self.tokenizer.token_to_id(name) for name in ("<|im_start|>", "<|im_end|>"))
        self.soi, self.eoi = (self.tokenizer.token_to_id(name) for name in ("<|vision_start|>", "<|vision_end|>"))
        vae_config = {"scale_factor": 0.3611, "shift_factor": 0.1159, **self.config["vae_config"]}
        self.vae_scale, self.vae_shift = (vae_config[f"{name}_factor"] for name in ("scale", "shift"))

    # -- weights ------------------------------------------------------------------------------------------------------

    def linear(self, name: str, x: Tensor) -> Tensor:
        return F.linear(x, self.weights[f"{name}.weight"], self.weights.get(f"{name}.bias"))

    def rms_norm(self, name: str, x: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], self.weights[f"{name}.weight"], self.eps)

    def layer_norm(self, name: str, x: Tensor) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], self.weights[f"{name}.weight"], self.weights[f"{name}.bias"], 1e-6)

    # -- the language model -------------------------------------------------------------------------------------------

    def new_context(self) -> Context:
        empty = torch.empty(0, self.num_kv_heads, self.head_size)
        return Context([empty] * self.num_layers, [empty] * self.num_layers)

    def embed(self, ids: list[int] | Tensor) -> Tensor:
        return self.weights["language_model.model.embed_tokens.weight"][torch.as_tensor(ids)]

    def by_kind(self, prefix: str, names: tuple[str, str], x: Tensor, is_latent: Tensor, apply: str) -> Tensor:
        """Both experts of a part, and of each token that of its kind."""
        made = [getattr(self, apply)(f"{prefix}{name}", x) for name in names]
        return torch.where(is_latent.reshape(-1, *[1] * (x.dim() - 1)), made[1], made[0])

    def mlp(self, name: str, x: Tensor) -> Tensor:
        gated = F.silu(self.linear(f"{name}.gate_proj", x)) * self.linear(f"{name}.up_proj", x)
        return self.linear(f"{name}.down_proj", gated)

    def forward(
        self, embeds: Tensor, positions: Tensor, context: Context, *, is_causal: bool, is_latent: Tensor | None = None
    ) -> tuple[Tensor, Context]:
        """Process tokens behind a context.

        Args:
            positions: for the rope, [n].
            is_causal: whether the tokens see only those before them; all see the whole context.
            is_latent: which tokens have the experts for latents, [n]; default: none.

        Returns:
            hidden states behind the final norm, [n, width]; and the context with the tokens in it.
        """
        num_tokens, num_before = len(embeds), context.num_tokens
        latent = torch.zeros(num_tokens, dtype=torch.bool) if is_latent is None else is_latent
        sees = torch.ones(num_tokens, num_before + num_tokens, dtype=torch.bool)
        if is_causal:
            sees = sees.tril(num_before)
        keys, values, x = list(context.keys), list(context.values), embeds
        for index in range(self.num_layers):
            layer = f"language_model.model.layers.{index}."

            def kinds(name: str) -> tuple[str, str]:
                return name, f"{name}_moe_gen"

            normed = self.by_kind(layer, kinds("input_layernorm"), x, latent, "rms_norm")
            q, k, v = (
                self.by_kind(f"{layer}self_attn.", kinds(f"{name}_proj"), normed, latent, "linear").unflatten(
                    -1, (-1, self.head_size)
                )
                for name in "qkv"
            )
            q, k = (
                self.rotate(
                    self.by_kind(f"{layer}self_attn.", kinds(f"{name}_norm"), one, latent, "rms_norm"), positions
                )
                for name, one in (("q", q), ("k", k))
            )
            keys[index], values[index] = torch.cat([keys[index], k]), torch.cat([values[index], v])
            attended = F.scaled_dot_product_attention(
                q.transpose(0, 1),
                keys[index].transpose(0, 1),
                values[index].transpose(0, 1),
                attn_mask=sees,
                enable_gqa=True,
            )
            attended = attended.transpose(0, 1).flatten(1)
            x = x + self.by_kind(f"{layer}self_attn.", kinds("o_proj"), attended, latent, "linear")
            normed = self.by_kind(layer, kinds("post_attention_layernorm"), x, latent, "rms_norm")
            x = x + self.by_kind(layer, kinds("mlp"), normed, latent, "mlp")
        hidden = self.by_kind("language_model.model.", ("norm", "norm_moe_gen"), x, latent, "rms_norm")
        return hidden, replace(context, keys=keys, values=values)

    def rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        half = self.head_size // 2
        inverse = 1.0 / self.rope_theta ** (torch.arange(half, dtype=torch.float32) / half)
        angles = positions[:, None, None].float() * inverse
        one, two = x[..., :half], x[..., half:]
        return torch.cat([one * angles.cos() - two * angles.sin(), two * angles.cos() + one * angles.sin()], dim=-1)

    # -- segments of a context ----------------------------------------------------------------------------------------

    def read_text(self, context: Context, text: str | list[int]) -> Context:
        """Behind a text, given as such or as ids."""
        ids = text if isinstance(text, list) else self.tokenizer.encode(text, add_special_tokens=False).ids
        ids = [self.bos, *ids, self.eos]
        positions = context.position + torch.arange(len(ids))
        hidden, read = self.forward(self.embed(ids), positions, context, is_causal=True)
        return replace(read, position=context.position + len(ids), hidden=[*context.hidden, hidden])

    def read_latents(self, context: Context, latent: Tensor) -> Context:
        """Behind an image as the VAE sees it.

        Args:
            latent: [16, h, w], scaled.
        """
        hidden, read = self._canvas_pass(context, tokens_of(latent), grid_of(latent), torch.zeros(()))
        return replace(read, position=context.position + 1, hidden=[*context.hidden, hidden])

    def read_view(self, context: Context, image: Image.Image) -> Context:
        """Behind an image as the vision transformer sees it."""
        embeds = self.between_marks(self.encode_view(image))
        positions = torch.full((len(embeds),), context.position)
        hidden, read = self.forward(embeds, positions, context, is_causal=False)
        return replace(read, position=context.position + 1, hidden=[*context.hidden, hidden])

    def between_marks(self, embeds: Tensor) -> Tensor:
        return torch.cat([self.embed([self.soi]), embeds, self.embed([self.eoi])])

    # -- images -------------------------------------------------------------------------------------------------------

    def resize(self, image: Image.Image, transform: str) -> Image.Image:
        """To sides that are multiples of the stride, within the limits, of about the same shape."""
        sizes = self.transforms[transform]
        longest, shortest, stride = (sizes[f"{name}"] for name in ("max_image_size", "min_image_size", "image_stride"))

        def scaled(scale: float, sides: tuple[int, int]) -> tuple[int, int]:
            width, height = (max(stride, round(round(side * scale) / stride) * stride) for side in sides)
            return width, height

        scale = max(min(longest / max(image.size), 1.0), shortest / min(image.size))
        sides = scaled(scale, image.size)
        if max(sides) > longest:
            sides = scaled(longest / max(sides), sides)
        return image.convert("RGB").resize(sides, Image.Resampling.BICUBIC)

    def pixels(self, image: Image.Image) -> Tensor:
        """[3, H, W] from -1 to 1."""
        values = torch.from_numpy(np.array(image)).permute(2, 0, 1).float() / 255
        return (values - 0.5) / 0.5

    def encode_view(self, image: Image.Image) -> Tensor:
        """The embeddings of an image's patches: [rows * columns, width]."""
        config, model = self.config["vit_config"], "vit_model.vision_model."
        size, num_heads = config["patch_size"], config["num_attention_heads"]
        pixels = self.pixels(self.resize(image, "vit_transform"))
        rows, columns = pixels.shape[1] // size, pixels.shape[2] // size
        patches = pixels.reshape(3, rows, size, columns, size).permute(1, 3, 2, 4, 0).flatten(2).flatten(0, 1)
        places = places_of(rows, columns, self.config["vit_max_num_patch_per_side"])
        x = self.linear(f"{model}embeddings.patch_embedding", patches)
        x = x + self.weights[f"{model}embeddings.position_embedding.weight"][places]
        num_layers = sum(name.endswith("layer_norm1.weight") for name in self.weights)
        for layer in (f"{model}encoder.layers.{index}." for index in range(num_layers)):
            normed = self.layer_norm(f"{layer}layer_norm1", x)
            q, k, v = (
                self.linear(f"{layer}self_attn.{name}_proj", normed).unflatten(-1, (num_heads, -1)).transpose(0, 1)
                for name in "qkv"
            )
            attended = F.scaled_dot_product_attention(q, k, v).transpose(0, 1).flatten(1)
            x = x + self.linear(f"{layer}self_attn.out_proj", attended)
            inner = self.linear(f"{layer}mlp.fc1", self.layer_norm(f"{layer}layer_norm2", x))
            x = x + self.linear(f"{layer}mlp.fc2", F.gelu(inner, approximate="tanh"))
        x = self.layer_norm(f"{model}post_layernorm", x)
        x = self.linear("connector.fc2", F.gelu(self.linear("connector.fc1", x), approximate="tanh"))
        return x + self.weights["vit_pos_embed.pos_embed"][places]

    def encode_pixels(self, image: Image.Image, noise: Tensor | None) -> Tensor:
        """The scaled latent of an image, [16, h, w]: a draw of the VAE's posterior.

        Args:
            image: as ``resize`` returns it for the VAE.
            noise: the draw, [16, h, w]; None: the mean.
        """
        posterior = self.vae.encode(self.pixels(image)[None]).latent_dist
        latent = posterior.mean[0] if noise is None else posterior.mean[0] + posterior.std[0] * noise
        return self.vae_scale * (latent - self.vae_shift)

    def decode_latents(self, tokens: Tensor, rows: int, columns: int) -> np.ndarray:
        """A picture of the last latents: [H, W, 3], uint8, truncated as in the original."""
        latent = latent_of(tokens, rows, columns)
        image = self.vae.decode((latent / self.vae_scale + self.vae_shift)[None]).sample[0]
        values: np.ndarray = ((image * 0.5 + 0.5).clamp(0, 1) * 255).permute(1, 2, 0).to(torch.uint8).numpy()
        return values

    # -- text ---------------------------------------------------------------------------------------------------------

    def answer(self, context: Context, max_tokens: int) -> tuple[list[int], Tensor]:
        """Greedy ids behind a context, and the logits of each step, [steps, vocabulary].

        The first token that is fed is bos. The ids end with eos, if it comes within so many steps.
        """
        ids, logits, token = [], [], self.bos
        for _ in range(max_tokens):
            hidden, context = self.forward(
                self.embed([token]), torch.tensor([context.position]), context, is_causal=True
            )
            context = replace(context, position=context.position + 1)
            logits.append(self.linear("language_model.lm_head", hidden)[0])
            token = int(logits[-1].argmax())
            ids.append(token)
            if token == self.eos:
                break
        return ids, torch.stack(logits)

    def thought(self, ids: list[int], max_tokens: int) -> str:
        """The text of an answer: without eos, and without what the last of so many steps made."""
        kept = ids[:-1] if ids[-1] == self.eos or len(ids) == max_tokens else ids
        return self.tokenizer.decode(kept, skip_special_tokens=False)

    # -- pictures -----------------------------------------------------------------------------------------------------

    def velocity(self, context: Context, latents: Tensor, grid: tuple[int, int], timestep: Tensor) -> Tensor:
        """[tokens, 64]."""
        hidden, _ = self._canvas_pass(context, latents, grid, timestep)
        return self.linear("llm2vae", hidden[1:-1])

    def _canvas_pass(
        self, context: Context, latents: Tensor, grid: tuple[int, int], timestep: Tensor
    ) -> tuple[Tensor, Context]:
        places = places_of(*grid, self.config["max_latent_size"])
        embeds = self.linear("vae2llm", latents) + self.embed_timestep(timestep)
        embeds = self.between_marks(embeds + self.weights["latent_pos_embed.pos_embed"][places])
        is_latent = torch.ones(len(embeds), dtype=torch.bool)
        is_latent[[0, -1]] = False
        positions = torch.full((len(embeds),), context.position)
        return self.forward(embeds, positions, context, is_causal=False, is_latent=is_latent)

    def embed_timestep(self, timestep: Tensor) -> Tensor:
        half = self.weights["time_embedder.mlp.0.weight"].shape[1] // 2
        angles = timestep * torch.exp(-np.log(10000) * torch.arange(half, dtype=torch.float32) / half)
        wave = torch.cat([angles.cos(), angles.sin()])
        return self.linear("time_embedder.mlp.2", F.silu(self.linear("time_embedder.mlp.0", wave)))

    def denoise(
        self,
        noise: Tensor,
        grid: tuple[int, int],
        branches: tuple[Context, Context, Context],
        *,
        num_timesteps: int,
        shift: float,
        guidance: Guidance,
    ) -> Canvas:
        """Euler steps from noise to a picture.

        Args:
            noise: [tokens, 64].
            grid: rows and columns of tokens.
            branches: contexts of the picture; without the last text; without images.
            num_timesteps: one more than steps.
        """
        times = torch.linspace(1, 0, num_timesteps)
        times = shift * times / (1 + (shift - 1) * times)
        latents, velocities = [noise], []
        for now, after in pairwise(times):
            x = latents[-1]
            low, high = guidance.interval
            velocity = self.velocity(branches[0], x, grid, now)
            if low < now <= high and guidance.text_scale > 1:
                without_text = self.velocity(branches[1], x, grid, now)
                without_images = self.velocity(branches[2], x, grid, now) if guidance.image_scale > 1 else None
                velocity = combine(velocity, without_text, without_images, guidance)
            velocities.append(velocity)
            latents.append(x - velocity * (now - after))
        return Canvas(times[:-1], torch.stack(velocities), torch.stack(latents))


def combine(velocity: Tensor, without_text: Tensor, without_images: Tensor | None, guidance: Guidance) -> Tensor:
    """The guided velocity of three branches, [tokens, 64], whose length is at most the unguided one's."""

    def shortened(guided: Tensor) -> Tensor:
        dims = (0, 1) if guidance.renorm == "global" else (1,)
        length, limit = (torch.linalg.vector_norm(one, dim=dims, keepdim=True) for one in (guided, velocity))
        return guided * (limit / (length + 1e-8)).clamp(guidance.renorm_min, 1.0)

    guided = without_text + guidance.text_scale * (velocity - without_text)
    if guidance.renorm == "text_channel":
        guided = shortened(guided)
    if without_images is not None:
        guided = without_images + guidance.image_scale * (guided - without_images)
    return guided if guidance.renorm == "text_channel" else shortened(guided)


def tokens_of(latent: Tensor) -> Tensor:
    """[16, h, w] -> [h/2 * w/2, 64]: a token is a patch of 2 by 2."""
    channels, height, width = latent.shape
    patches = latent.reshape(channels, height // 2, 2, width // 2, 2).permute(1, 3, 2, 4, 0)
    return patches.reshape(-1, 4 * channels)


def latent_of(tokens: Tensor, rows: int, columns: int) -> Tensor:
    """The reverse of ``tokens_of``."""
    patches = tokens.reshape(rows, columns, 2, 2, -1).permute(4, 0, 2, 1, 3)
    return patches.reshape(-1, 2 * rows, 2 * columns)


def grid_of(latent: Tensor) -> tuple[int, int]:
    return latent.shape[1] // 2, latent.shape[2] // 2


def places_of(rows: int, columns: int, side: int) -> Tensor:
    """The indexes of a grid's cells in a table for ``side`` cells a row."""
    return (torch.arange(rows)[:, None] * side + torch.arange(columns)).flatten()


def read_sizes(path: Path, config: dict[str, Any]) -> dict[str, Any]:
    """The limits of images by transform, in the form of ``transforms.json``."""
    if (given := config.get("image_sizes")) is None:
        made: dict[str, Any] = json.loads((path / "transforms.json").read_text())
        return made
    names = ("max_image_size", "min_image_size", "image_stride")
    sizes = {"vae_transform": given["latents"], "vit_transform": given["view"]}
    return {transform: dict(zip(names, one, strict=True)) for transform, one in sizes.items()}


def load_vae(path: Path, config: dict[str, int]) -> AutoencoderKL:
    """The checkpoint's auto-encoder as diffusers' own."""
    num_levels = len(config["ch_mult"])
    made = {
        "block_out_channels": [config["ch"] * factor for factor in config["ch_mult"]],
        "down_block_types": ["DownEncoderBlock2D"] * num_levels,
        "up_block_types": ["UpDecoderBlock2D"] * num_levels,
        "layers_per_block": config["num_res_blocks"],
        "latent_channels": config["z_channels"],
        "use_quant_conv": False,
        "use_post_quant_conv": False,
    }
    vae = AutoencoderKL(**made).eval()
    vae.load_state_dict(convert_ldm_vae_checkpoint(load_file(path / "ae.safetensors"), made))
    return vae
