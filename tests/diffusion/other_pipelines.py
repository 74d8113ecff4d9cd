"""Pipelines that have no tiny checkpoint."""

import inspect
from typing import Any

import torch
from diffusers import (
    AutoencoderKL,
    DDPMPipeline,
    DDPMScheduler,
    EulerAncestralDiscreteScheduler,
    StableDiffusionPipeline,
    UNet2DConditionModel,
    UNet2DModel,
)


def make_from(pipeline: Any, kind: type) -> Any:
    """Another pipeline of the same components."""
    parameters = inspect.signature(kind).parameters
    made = kind(**{name: part for name, part in pipeline.components.items() if name in parameters})
    made.set_progress_bar_config(disable=True)
    return made


def make_ddpm() -> DDPMPipeline:
    """Without a prompt; a network outside the table; noise in every step."""
    torch.manual_seed(0)
    unet = UNet2DModel(
        sample_size=8,
        in_channels=3,
        out_channels=3,
        layers_per_block=1,
        block_out_channels=(8, 8),
        norm_num_groups=4,
        down_block_types=("DownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "UpBlock2D"),
    )
    pipeline = DDPMPipeline(unet.eval(), DDPMScheduler(num_train_timesteps=50))
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def make_stable_diffusion(text_encoder: Any, tokenizer: Any) -> StableDiffusionPipeline:
    """With a U-Net, and noise in every step."""
    torch.manual_seed(0)
    unet = UNet2DConditionModel(
        sample_size=8,
        layers_per_block=1,
        block_out_channels=(8, 16),
        norm_num_groups=4,
        attention_head_dim=4,
        cross_attention_dim=text_encoder.config.hidden_size,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
    )
    vae = AutoencoderKL(
        block_out_channels=(8, 8),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        norm_num_groups=4,
    )
    pipeline = StableDiffusionPipeline(
        vae=vae.eval(),
        text_encoder=text_encoder,
        tokenizer=tokenizer,
        unet=unet.eval(),
        scheduler=EulerAncestralDiscreteScheduler(steps_offset=1),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )
    pipeline.set_progress_bar_config(disable=True)
    return pipeline
