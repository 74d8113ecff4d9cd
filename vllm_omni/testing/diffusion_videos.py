"""Makers of the tiny pipelines for video and sound: real classes and settings, few and narrow layers.

Weights are those of construction; ``tiny.build`` overwrites them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from vllm_omni.testing import diffusion_text as tiny_text
from vllm_omni.testing.diffusion_images import WAN_VAE

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline


def make_wan_transformer(**config: Any) -> Any:
    import diffusers

    return diffusers.WanTransformer3DModel(
        num_layers=2,
        num_attention_heads=2,
        attention_head_dim=16,
        text_dim=32,
        freq_dim=256,
        ffn_dim=64,
        **config,
    )


def make_wan22_t2v() -> DiffusionPipeline:
    """Wan-AI/Wan2.2-T2V-A14B-Diffusers: one expert above, one below 0.875 of the noise."""
    import diffusers

    tokenizer = tiny_text.make_t5_tokenizer()
    return diffusers.WanPipeline(
        tokenizer=tokenizer,
        text_encoder=tiny_text.make_umt5(tokenizer),
        vae=diffusers.AutoencoderKLWan(**WAN_VAE),
        scheduler=diffusers.UniPCMultistepScheduler(
            prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0
        ),
        transformer=make_wan_transformer(),
        transformer_2=make_wan_transformer(),
        boundary_ratio=0.875,
    )


def make_wan22_i2v() -> DiffusionPipeline:
    """Wan-AI/Wan2.2-I2V-A14B-Diffusers: the transformers read 16 latent channels, 16 of the image and 4 of a mask."""
    import diffusers

    tokenizer = tiny_text.make_t5_tokenizer()
    return diffusers.WanImageToVideoPipeline(
        tokenizer=tokenizer,
        text_encoder=tiny_text.make_umt5(tokenizer),
        vae=diffusers.AutoencoderKLWan(**WAN_VAE),
        scheduler=diffusers.UniPCMultistepScheduler(
            prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0
        ),
        transformer=make_wan_transformer(in_channels=36, out_channels=16),
        transformer_2=make_wan_transformer(in_channels=36, out_channels=16),
        boundary_ratio=0.9,
    )


def make_hunyuan_video() -> DiffusionPipeline:
    """hunyuanvideo-community/HunyuanVideo."""
    import diffusers
    from diffusers.pipelines.hunyuan_video.pipeline_hunyuan_video import DEFAULT_PROMPT_TEMPLATE

    tokenizer = tiny_text.make_llama_tokenizer(DEFAULT_PROMPT_TEMPLATE["template"])
    tokenizer_2 = tiny_text.make_clip_tokenizer()
    return diffusers.HunyuanVideoPipeline(
        text_encoder=tiny_text.make_llama(tokenizer),
        tokenizer=tokenizer,
        transformer=diffusers.HunyuanVideoTransformer3DModel(
            in_channels=16,
            out_channels=16,
            num_attention_heads=2,
            attention_head_dim=16,
            num_layers=2,
            num_single_layers=2,
            num_refiner_layers=1,
            text_embed_dim=32,
            pooled_projection_dim=32,
            guidance_embeds=True,
            rope_axes_dim=(4, 6, 6),
        ),
        vae=diffusers.AutoencoderKLHunyuanVideo(
            block_out_channels=(8, 8, 16, 16), layers_per_block=1, norm_num_groups=4, scaling_factor=0.476986
        ),
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=7.0),
        text_encoder_2=tiny_text.make_clip(tokenizer_2),
        tokenizer_2=tokenizer_2,
    )


def make_ltx() -> DiffusionPipeline:
    """Lightricks/LTX-Video 0.9: 32x32 pixels of 8 frames are one latent of 128 channels."""
    import diffusers

    tokenizer = tiny_text.make_t5_tokenizer(max_length=128)
    return diffusers.LTXPipeline(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(
            base_image_seq_len=1024,
            base_shift=0.95,
            max_image_seq_len=4096,
            max_shift=2.05,
            shift_terminal=0.1,
            use_dynamic_shifting=True,
        ),
        vae=diffusers.AutoencoderKLLTXVideo(
            latent_channels=128,
            block_out_channels=(8, 8, 16, 16),
            decoder_block_out_channels=(8, 8, 16, 16),
            layers_per_block=(1,) * 5,
            decoder_layers_per_block=(1,) * 5,
        ),
        text_encoder=tiny_text.make_t5(tokenizer),
        tokenizer=tokenizer,
        transformer=diffusers.LTXVideoTransformer3DModel(
            in_channels=128,
            out_channels=128,
            num_layers=2,
            num_attention_heads=2,
            attention_head_dim=16,
            cross_attention_dim=32,
            caption_channels=32,
        ),
    )


def make_stable_audio() -> DiffusionPipeline:
    """stabilityai/stable-audio-open-1.0, for 16 latents: 0.74 s at 44.1 kHz, always all computed."""
    import diffusers

    tokenizer = tiny_text.make_t5_tokenizer(max_length=128)
    return diffusers.StableAudioPipeline(
        vae=diffusers.AutoencoderOobleck(
            encoder_hidden_size=4,
            downsampling_ratios=[2, 4, 4, 8, 8],
            channel_multiples=[1, 1, 2, 2, 4],
            decoder_channels=4,
            decoder_input_channels=64,
            audio_channels=2,
            sampling_rate=44100,
        ),
        text_encoder=tiny_text.make_t5(tokenizer),
        projection_model=diffusers.StableAudioProjectionModel(
            text_encoder_dim=32, conditioning_dim=32, min_value=0, max_value=512
        ),
        tokenizer=tokenizer,
        transformer=diffusers.StableAudioDiTModel(
            sample_size=16,
            in_channels=64,
            out_channels=64,
            num_layers=2,
            attention_head_dim=16,
            num_attention_heads=4,
            num_key_value_attention_heads=2,
            cross_attention_dim=32,
            cross_attention_input_dim=32,
            time_proj_dim=256,
            global_states_input_dim=64,
        ),
        scheduler=diffusers.CosineDPMSolverMultistepScheduler(
            sigma_min=0.3,
            sigma_max=500,
            sigma_data=1.0,
            sigma_schedule="exponential",
            prediction_type="v_prediction",
            solver_order=2,
        ),
    )


MAKERS: dict[str, Callable[[], DiffusionPipeline]] = {
    "hunyuan-video": make_hunyuan_video,
    "ltx": make_ltx,
    "stable-audio": make_stable_audio,
    "wan2.2-i2v": make_wan22_i2v,
    "wan2.2-t2v": make_wan22_t2v,
}
