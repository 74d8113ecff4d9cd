"""A plain reference of HunyuanImage-3: one sequence at a time, float32, no batching and no paging.

Written from facts about the original (``hunyuan_image_3/README.md`` of the golden data) and proved equal to it in
``test_hunyuan_image_3.py``. The VAE is not here: latents of images that are seen are given. Tensors have the rows of
one sequence, [n, width].
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional as F


class Seen(NamedTuple):
    """An image of the prompt, as the VAE and the vision transformer see it."""

    latent: Tensor  # [channels, h, w], scaled
    patches: Tensor  # [places, 3 * patch * patch], padded to a fixed number
    patch_grid: tuple[int, int]
    ratio: int


class Drawn(NamedTuple):
    """An image that is generated, in tokens."""

    rows: int
    columns: int
    ratio: int


Piece = list[int] | Seen | Drawn
"""Of a sequence: ids of a text, or an image."""


@dataclass
class Layout:
    """A sequence's tokens, where they lie, and what they see."""

    embeds: Tensor  # [n, width]; those of the generated image are filled in by each step
    places: Tensor  # [n, 2]: y and x for the rope
    sees: Tensor  # [n, n], bool
    canvas: slice | None = None  # the tokens of the generated image; the timestep token is before them


class Canvas(NamedTuple):
    """The steps of a picture."""

    timesteps: Tensor  # [steps], 0 to 1000
    predictions: Tensor  # [steps, 2, channels, h, w]: of the prompt, and without it
    velocities: Tensor  # [steps, channels, h, w]
    latents: Tensor  # [steps + 1, channels, h, w]


class Reference:
    """HunyuanImage-3 with its weights in float32.

    Args:
        path: a checkpoint in the layout of the published files.
    """

    def __init__(self, path: Path) -> None:
        self.config = config = json.loads((path / "config.json").read_text())
        self.weights = {name: one.float() for name, one in load_file(path / "model.safetensors").items()}
        self.tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
        self.head_size, self.num_heads = config["attention_head_dim"], config["num_attention_heads"]
        self.num_kv_heads = config["num_key_value_heads"]

    def token(self, name: str) -> int:
        token_id = self.tokenizer.token_to_id(name)
        assert token_id is not None, name
        return token_id

    def encode(self, section: str) -> list[int]:
        """The ids of one section: each is tokenized by itself."""
        return self.tokenizer.encode(section, add_special_tokens=False).ids

    # -- weights ------------------------------------------------------------------------------------------------------

    def linear(self, name: str, x: Tensor) -> Tensor:
        return F.linear(x, self.weights[f"{name}.weight"], self.weights.get(f"{name}.bias"))

    def rms_norm(self, name: str, x: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], self.weights[f"{name}.weight"], self.config["rms_norm_eps"])

    def layer_norm(self, name: str, x: Tensor) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], self.weights[f"{name}.weight"], self.weights[f"{name}.bias"], 1e-6)

    def group_norm(self, name: str, x: Tensor) -> Tensor:
        return F.group_norm(x, 32, self.weights[f"{name}.weight"], self.weights[f"{name}.bias"])

    def conv(self, name: str, x: Tensor) -> Tensor:
        weight = self.weights[f"{name}.weight"]
        return F.conv2d(x, weight, self.weights[f"{name}.bias"], padding=weight.shape[-1] // 2)

    # -- pieces of an image -------------------------------------------------------------------------------------------

    def embed_timestep(self, name: str, timestep: Tensor) -> Tensor:
        """[width]; the model has three such embedders."""
        half = self.weights[f"{name}.mlp.0.weight"].shape[1] // 2
        angles = timestep * torch.exp(-torch.log(torch.tensor(10000.0)) * torch.arange(half) / half)
        wave = torch.cat([angles.cos(), angles.sin()])
        return self.linear(f"{name}.mlp.2", F.gelu(self.linear(f"{name}.mlp.0", wave)))

    def residual(self, name: str, x: Tensor, time: Tensor) -> Tensor:
        """A convolution block that is scaled and shifted by the time."""
        scale, shift = self.linear(f"{name}.emb_layers.1", F.silu(time))[None, :, None, None].chunk(2, dim=1)
        inner = self.conv(f"{name}.in_layers.2", F.silu(self.group_norm(f"{name}.in_layers.0", x)))
        inner = self.group_norm(f"{name}.out_layers.0", inner) * (1 + scale) + shift
        return self.conv(f"{name}.skip_connection", x) + self.conv(f"{name}.out_layers.3", F.silu(inner))

    def embed_latent(self, latent: Tensor, timestep: Tensor) -> Tensor:
        """[channels, h, w] -> [h * w, width]."""
        x = self.conv("patch_embed.model.0", latent[None])
        x = self.residual("patch_embed.model.1", x, self.embed_timestep("time_embed", timestep))
        return x[0].flatten(1).T

    def predict(self, hidden: Tensor, grid: tuple[int, int], timestep: Tensor) -> Tensor:
        """The velocity of a latent, [channels, h, w], from hidden states that no norm follows, [h * w, width]."""
        x = hidden.T.reshape(1, -1, *grid)
        x = self.residual("final_layer.model.0", x, self.embed_timestep("time_embed_2", timestep))
        x = F.silu(self.group_norm("final_layer.model.1.0", x))
        return self.conv("final_layer.model.1.2", x)[0]

    def embed_view(self, seen: Seen) -> Tensor:
        """[places, width]: what the vision transformer sees; places without a patch stay in the sequence."""
        vit, model = self.config["vit"], "vision_model."
        rows, columns = seen.patch_grid
        num_patches = rows * columns
        side = int(len(self.weights[f"{model}embeddings.position_embedding.weight"]) ** 0.5)
        table = self.weights[f"{model}embeddings.position_embedding.weight"].reshape(1, side, side, -1)
        table = F.interpolate(
            table.permute(0, 3, 1, 2), (rows, columns), mode="bilinear", align_corners=False, antialias=True
        )
        positions = table[0].flatten(1).T
        positions = torch.cat([positions, positions[:1].expand(len(seen.patches) - num_patches, -1)])
        x = self.linear(f"{model}embeddings.patch_embedding", seen.patches) + positions
        sees = (torch.arange(len(x)) < num_patches).expand(len(x), -1)
        for layer in (f"{model}encoder.layers.{index}." for index in range(vit["num_hidden_layers"])):
            normed = self.layer_norm(f"{layer}layer_norm1", x)
            q, k, v = (
                self.linear(f"{layer}self_attn.{name}_proj", normed)
                .unflatten(-1, (vit["num_attention_heads"], -1))
                .transpose(0, 1)
                for name in "qkv"
            )
            attended = F.scaled_dot_product_attention(q, k, v, attn_mask=sees).transpose(0, 1).flatten(1)
            x = x + self.linear(f"{layer}self_attn.out_proj", attended)
            inner = self.linear(f"{layer}mlp.fc1", self.layer_norm(f"{layer}layer_norm2", x))
            x = x + self.linear(f"{layer}mlp.fc2", F.gelu(inner, approximate="tanh"))
        x = self.layer_norm(f"{model}post_layernorm", x)
        return self.linear("vision_aligner.layers.2", F.gelu(self.linear("vision_aligner.layers.0", x)))

    # -- sequences ----------------------------------------------------------------------------------------------------

    def embed(self, ids: Sequence[int]) -> Tensor:
        return self.weights["model.wte.weight"][torch.as_tensor(ids, dtype=torch.long)]

    def sequence(self, pieces: Sequence[Piece]) -> Layout:
        """Lay out a sequence behind its first token.

        Tokens see those before them, and all of the image that they are in: of one that is seen, latents, separator
        and view together.
        """
        embeds, places, full = [], [], []
        canvas: slice | None = None
        num_tokens = 0

        def add(rows: Tensor, grid: tuple[int, int] | None = None) -> None:
            nonlocal num_tokens
            embeds.append(rows)
            indexes = torch.arange(num_tokens, num_tokens + len(rows))
            laid = indexes[:, None].repeat(1, 2)
            if grid is not None:
                size = grid[0] * grid[1]
                cells = torch.stack(torch.meshgrid(*(torch.arange(side) for side in grid), indexing="ij"), dim=-1)
                first = num_tokens + (size - torch.tensor(grid)) / 2
                laid[:size] = (first + cells.reshape(-1, 2)).to(torch.long)
            places.append(laid)
            num_tokens += len(rows)

        def add_image(ratio: int, timestep: Tensor | None) -> None:
            marks = [
                f"<{name}>" for name in ("boi", f"img_size_{self.config['image_base_size']}", f"img_ratio_{ratio}")
            ]
            add(self.embed([self.token(mark) for mark in marks]))
            if timestep is not None:
                add(self.embed_timestep("timestep_emb", timestep)[None])
            else:
                add(self.embed([self.token("<timestep>")]))

        add(self.embed([self.config["bos_token_id"]]))
        for piece in pieces:
            if isinstance(piece, list):
                add(self.embed(piece))
                continue
            add_image(piece.ratio, torch.zeros(()) if isinstance(piece, Seen) else None)
            first = num_tokens
            if isinstance(piece, Seen):
                grid = piece.latent.shape[1], piece.latent.shape[2]
                add(self.embed_latent(piece.latent, torch.zeros(())), grid)
                add(self.embed([self.token("<joint_img_sep>")]))
                add(self.embed_view(piece), piece.patch_grid)
            else:
                size = piece.rows * piece.columns
                canvas = slice(first, first + size)
                add(self.embed([self.token("<img>")] * size), (piece.rows, piece.columns))
            full.append(slice(first, num_tokens))
            add(self.embed([self.token("<eoi>")]))
        sees = torch.ones(num_tokens, num_tokens, dtype=torch.bool).tril()
        for one in full:
            sees[one, one] = True
        return Layout(torch.cat(embeds), torch.cat(places), sees, canvas)

    def rotate(self, x: Tensor, places: Tensor) -> Tensor:
        """Rotate heads [n, heads, size] by y in the even frequencies, by x in the odd ones."""
        half = self.head_size // 2
        inverse = 1.0 / self.config["rope_theta"] ** (torch.arange(half, dtype=torch.float32) / half)
        angles = places[:, torch.arange(half) % 2].float() * inverse
        cos, sin = (torch.cat([one, one], dim=-1)[:, None] for one in (angles.cos(), angles.sin()))
        turned = torch.cat([-x[..., half:], x[..., :half]], dim=-1)
        return x * cos + turned * sin

    def forward(self, embeds: Tensor, sequence: Layout, rows: slice, cache: list[tuple[Tensor, Tensor]]) -> Tensor:
        """Process some tokens of a sequence; hidden states before the final norm, [rows, width].

        Args:
            cache: keys and values of each layer, [tokens so far, KV heads, head size], in which those of the rows are
                written, or to which they are appended.
        """
        x, places = embeds, sequence.places[rows]
        for index in range(self.config["num_hidden_layers"]):
            layer = f"model.layers.{index}."
            normed = self.rms_norm(f"{layer}input_layernorm", x)
            # By group: its queries, its key, its value.
            grouped = self.linear(f"{layer}self_attn.qkv_proj", normed).reshape(
                len(x), self.num_kv_heads, -1, self.head_size
            )
            q, k, v = grouped[:, :, :-2].flatten(1, 2), grouped[:, :, -2], grouped[:, :, -1]
            q = self.rms_norm(f"{layer}self_attn.query_layernorm", self.rotate(q, places))
            k = self.rms_norm(f"{layer}self_attn.key_layernorm", self.rotate(k, places))
            if index == len(cache):
                cache.append((k[:0], v[:0]))
            cache[index] = tuple(  # type: ignore[assignment]
                torch.cat([old[: rows.start], new, old[rows.stop :]])
                for old, new in zip(cache[index], (k, v), strict=True)
            )
            keys, values = (one.transpose(0, 1) for one in cache[index])
            sees = sequence.sees[rows, : keys.shape[1]]
            attended = F.scaled_dot_product_attention(q.transpose(0, 1), keys, values, attn_mask=sees, enable_gqa=True)
            x = x + self.linear(f"{layer}self_attn.o_proj", attended.transpose(0, 1).flatten(1))
            x = x + self.mixture(f"{layer}mlp.", self.rms_norm(f"{layer}post_attention_layernorm", x))
        return x

    def mixture(self, name: str, x: Tensor) -> Tensor:
        """The shared MLP, and the best experts of each token."""
        weights = self.linear(f"{name}gate.wg", x).softmax(dim=-1)
        best, chosen = weights.topk(self.config["moe_topk"][0])
        best = best / best.sum(dim=-1, keepdim=True)
        made = self.mlp(f"{name}shared_mlp", x)
        for expert in range(self.config["num_experts"]):
            share = (best * (chosen == expert)).sum(dim=-1, keepdim=True)
            made = made + share * self.mlp(f"{name}experts.{expert}", x)
        return made

    def mlp(self, name: str, x: Tensor) -> Tensor:
        """The activation is that of the second half, unlike in most models."""
        first, second = self.linear(f"{name}.gate_and_up_proj", x).chunk(2, dim=-1)
        return self.linear(f"{name}.down_proj", first * F.silu(second))

    # -- text ---------------------------------------------------------------------------------------------------------

    def answer(self, pieces: Sequence[Piece], max_tokens: int, stop_ids: Sequence[int]) -> tuple[list[int], Tensor]:
        """Greedy ids behind a sequence, a stop id included, and the logits of each step, [steps, vocabulary]."""
        sequence = self.sequence(pieces)
        cache: list[tuple[Tensor, Tensor]] = []
        num_prompt = len(sequence.embeds)
        hidden = self.forward(sequence.embeds, sequence, slice(0, num_prompt), cache)[-1]
        total = num_prompt + max_tokens
        sees = torch.ones(total, total, dtype=torch.bool).tril()
        sees[:num_prompt, :num_prompt] = sequence.sees
        places = torch.cat([sequence.places, torch.arange(num_prompt, total)[:, None].repeat(1, 2)])
        sequence = Layout(sequence.embeds, places, sees)
        ids: list[int] = []
        logits: list[Tensor] = []
        while True:
            logits.append(self.linear("lm_head", self.rms_norm("model.ln_f", hidden)))
            ids.append(int(logits[-1].argmax()))
            if ids[-1] in stop_ids or len(ids) == max_tokens:
                return ids, torch.stack(logits)
            row = slice(num_prompt + len(ids) - 1, num_prompt + len(ids))
            hidden = self.forward(self.embed(ids[-1:]), sequence, row, cache)[0]

    # -- pictures -----------------------------------------------------------------------------------------------------

    def denoise(
        self, noise: Tensor, rows: tuple[Sequence[Piece], Sequence[Piece]], *, num_steps: int, guidance: float
    ) -> Canvas:
        """Euler steps from noise to a latent.

        The first step computes the whole sequence; later ones only the timestep token and the latents, whose keys and
        values replace those of the step before. What follows the image keeps those of the first step.

        Args:
            noise: [channels, h, w].
            rows: the sequence, and the same with ``<cfg>`` in place of the prompt.
        """
        sigmas = torch.linspace(1, 0, num_steps + 1)
        sigmas = 3 * sigmas / (1 + 2 * sigmas)
        timesteps = sigmas[:-1] * 1000
        sequences = [self.sequence(row) for row in rows]
        caches: list[list[tuple[Tensor, Tensor]]] = [[] for _ in rows]
        latents, predictions, velocities = [noise], [], []
        for number, (timestep, (now, after)) in enumerate(zip(timesteps, pairwise(sigmas), strict=True)):
            made = []
            for sequence, cache in zip(sequences, caches, strict=True):
                assert sequence.canvas is not None
                step = slice(sequence.canvas.start - 1, sequence.canvas.stop)
                embeds = torch.cat(
                    [
                        self.embed_timestep("timestep_emb", timestep)[None],
                        self.embed_latent(latents[-1], timestep),
                    ]
                )
                if number == 0:
                    embeds = torch.cat([sequence.embeds[: step.start], embeds, sequence.embeds[step.stop :]])
                    hidden = self.forward(embeds, sequence, slice(0, len(embeds)), cache)[sequence.canvas]
                else:
                    hidden = self.forward(embeds, sequence, step, cache)[1:]
                made.append(self.predict(hidden, (noise.shape[1], noise.shape[2]), timestep))
            predictions.append(torch.stack(made))
            velocities.append(made[1] + guidance * (made[0] - made[1]))
            latents.append(latents[-1] + velocities[-1] * (after - now))
        return Canvas(timesteps, torch.stack(predictions), torch.stack(velocities), torch.stack(latents))
