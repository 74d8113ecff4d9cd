"""Tiny denoisers of diffusers with random weights, and runs of them: a loop of a few steps around each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import diffusers
import torch
from torch import Tensor, nn

from vllm_omni.diffusion.first_block_cache import RowKey, RowStep

TEXT_DIM = 32
POOLED_DIM = 16


@dataclass(frozen=True)
class Family:
    """A class of denoisers, and how its calls look."""

    class_name: str
    config: Mapping[str, Any]
    latent_shape: tuple[int, ...]  # of one row
    make_kwargs: Callable[[list[Tensor], list[Tensor], Tensor], dict[str, Any]]  # latents and texts of rows, sigmas
    seed: int = 0

    def build(self, seed: int | None = None) -> nn.Module:
        torch.manual_seed(self.seed if seed is None else seed)
        module = getattr(diffusers, self.class_name)(**self.config).eval().requires_grad_(False)
        for name, parameter in module.named_parameters():
            if "pad_token" in name:  # not initialised by the class
                parameter.normal_()
        return module


def _pooled(texts: list[Tensor]) -> Tensor:
    return torch.stack([text[0, :POOLED_DIM] for text in texts])


def _qwen(latents: list[Tensor], texts: list[Tensor], sigmas: Tensor) -> dict[str, Any]:
    longest = max(len(text) for text in texts)
    mask = torch.stack([torch.arange(longest) < len(text) for text in texts])
    padded = nn.utils.rnn.pad_sequence(texts, batch_first=True)
    return {
        "hidden_states": torch.stack(latents),
        "encoder_hidden_states": padded,
        "encoder_hidden_states_mask": mask,
        "timestep": sigmas,
        "img_shapes": [[(1, 4, 4)]] * len(latents),
        "attention_kwargs": {},
    }


def _flux(latents: list[Tensor], texts: list[Tensor], sigmas: Tensor) -> dict[str, Any]:
    rows, columns = torch.meshgrid(torch.arange(4.0), torch.arange(4.0), indexing="ij")
    return {
        "hidden_states": torch.stack(latents),
        "encoder_hidden_states": torch.stack([text[:6] for text in texts]),
        "pooled_projections": _pooled(texts),
        "timestep": sigmas,
        "img_ids": torch.stack([torch.zeros(16), rows.flatten(), columns.flatten()], dim=1),
        "txt_ids": torch.zeros(6, 3),
        "guidance": torch.full_like(sigmas, 3.5),
    }


def _wan(latents: list[Tensor], texts: list[Tensor], sigmas: Tensor) -> dict[str, Any]:
    return {
        "hidden_states": torch.stack(latents),
        "encoder_hidden_states": torch.stack([text[:6] for text in texts]),
        "timestep": sigmas * 1000,
    }


def _hunyuan(latents: list[Tensor], texts: list[Tensor], sigmas: Tensor) -> dict[str, Any]:
    mask = torch.stack([torch.arange(12) < len(text) for text in texts])
    padded = torch.stack([nn.functional.pad(text, (0, 0, 0, 12 - len(text))) for text in texts])
    return {
        "hidden_states": torch.stack(latents),
        "encoder_hidden_states": padded,
        "encoder_attention_mask": mask,
        "pooled_projections": _pooled(texts),
        "timestep": sigmas * 1000,
        "guidance": torch.full_like(sigmas, 6000.0),
    }


def _sd3(latents: list[Tensor], texts: list[Tensor], sigmas: Tensor) -> dict[str, Any]:
    return {
        "hidden_states": torch.stack(latents),
        "encoder_hidden_states": torch.stack([text[:6] for text in texts]),
        "pooled_projections": _pooled(texts),
        "timestep": sigmas * 1000,
    }


def _z_image(latents: list[Tensor], texts: list[Tensor], sigmas: Tensor) -> dict[str, Any]:
    return {"x": latents, "t": 1 - sigmas, "cap_feats": texts}


_ROPE = {"num_attention_heads": 2, "attention_head_dim": 16}

FAMILIES = {
    "qwen_image": Family(
        "QwenImageTransformer2DModel",
        {**_ROPE, "in_channels": 16, "out_channels": 4, "num_layers": 4, "joint_attention_dim": TEXT_DIM,
         "axes_dims_rope": (4, 6, 6)},
        (16, 16),
        _qwen,
    ),
    "flux": Family(
        "FluxTransformer2DModel",
        {**_ROPE, "in_channels": 16, "num_layers": 2, "num_single_layers": 2, "joint_attention_dim": TEXT_DIM,
         "pooled_projection_dim": POOLED_DIM, "guidance_embeds": True, "axes_dims_rope": (4, 6, 6)},
        (16, 16),
        _flux,
    ),
    "wan": Family(
        "WanTransformer3DModel",
        {**_ROPE, "in_channels": 4, "out_channels": 4, "text_dim": TEXT_DIM, "freq_dim": 16, "ffn_dim": 32,
         "num_layers": 3, "rope_max_seq_len": 32},
        (4, 2, 8, 8),
        _wan,
    ),
    "hunyuan_video": Family(
        "HunyuanVideoTransformer3DModel",
        {**_ROPE, "in_channels": 4, "out_channels": 4, "num_layers": 2, "num_single_layers": 2,
         "num_refiner_layers": 1, "text_embed_dim": TEXT_DIM, "pooled_projection_dim": POOLED_DIM,
         "rope_axes_dim": (4, 6, 6)},
        (4, 2, 8, 8),
        _hunyuan,
    ),
    "sd3": Family(
        "SD3Transformer2DModel",
        {**_ROPE, "sample_size": 8, "in_channels": 4, "out_channels": 4, "num_layers": 4,
         "joint_attention_dim": TEXT_DIM, "caption_projection_dim": 32, "pooled_projection_dim": POOLED_DIM,
         "pos_embed_max_size": 8},
        (4, 8, 8),
        _sd3,
    ),
    "z_image": Family(
        "ZImageTransformer2DModel",
        {"in_channels": 4, "dim": 32, "n_layers": 3, "n_refiner_layers": 1, "n_heads": 2, "n_kv_heads": 2,
         "cap_feat_dim": TEXT_DIM, "axes_dims": [4, 6, 6], "axes_lens": [256, 32, 32]},
        (4, 1, 8, 8),
        _z_image,
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Request:
    """A generation of a test; all of it follows from ``seed``."""

    request_id: str
    seed: int
    num_steps: int
    threshold: float = 0.0
    first_tick: int = 0  # when it joins the others
    text_length: int = 8
    shape: tuple[int, ...] | None = None  # None: the family's


class Row(NamedTuple):
    """One row of a denoiser call."""

    key: RowKey
    step: RowStep
    latents: Tensor
    text: Tensor
    sigma: float


Call = Callable[[str, list[Row]], list[Tensor]]  # the component and rows -> a prediction for each row
GUIDANCE_SCALE = 2.0


def denoise(
    family: Family,
    requests: list[Request],
    call: Call,
    switch_at: float = 0.0,
    on_tick: Callable[[int], None] | None = None,
) -> dict[str, Tensor]:
    """Run requests side by side, each with guidance, one step in a tick; the latents of each at its end.

    Args:
        switch_at: share of the steps after which ``transformer_2`` takes over from ``transformer``; 0: never.
        on_tick: called with the number of each tick before it.
    """
    latents, texts = {}, {}
    for request in requests:
        generator = torch.Generator().manual_seed(request.seed)
        latents[request.request_id] = torch.randn(request.shape or family.latent_shape, generator=generator)
        for branch in ("cond", "uncond"):
            texts[request.request_id, branch] = torch.randn(request.text_length, TEXT_DIM, generator=generator)
    for tick in range(max(request.first_tick + request.num_steps for request in requests)):
        if on_tick is not None:
            on_tick(tick)
        rows: dict[str, list[Row]] = {}
        for request in requests:
            step = RowStep(tick - request.first_tick, request.num_steps)
            if not 0 <= step.step_index < step.num_steps:
                continue
            is_second = switch_at > 0 and step.step_index >= switch_at * step.num_steps
            component = "transformer_2" if is_second else "transformer"
            for branch in ("cond", "uncond"):
                key = RowKey(request.request_id, component, branch, 0)
                text = texts[request.request_id, branch]
                sigma = 1 - step.step_index / step.num_steps
                rows.setdefault(component, []).append(Row(key, step, latents[request.request_id], text, sigma))
        for component, group in rows.items():
            predictions = {row.key: part for row, part in zip(group, call(component, group), strict=True)}
            for row in group:
                if row.key.branch == "cond":
                    cond, uncond = predictions[row.key], predictions[row.key._replace(branch="uncond")]
                    guided = uncond + GUIDANCE_SCALE * (cond - uncond)
                    latents[row.key.request_id] = row.latents - guided / row.step.num_steps
    return latents


def kwargs_of(family: Family, rows: list[Row]) -> dict[str, Any]:
    kwargs = family.make_kwargs(
        [row.latents for row in rows], [row.text for row in rows], torch.tensor([row.sigma for row in rows])
    )
    return {**kwargs, "return_dict": False}
