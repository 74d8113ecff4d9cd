"""One function for each tiny pipeline: the real classes and settings, narrow and shallow.

Weights are those of construction; ``tiny.build`` overwrites them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from vllm_omni.model_executor.models.diffusers import tiny_text

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline

# Of Qwen-Image, Wan 2.1 and Wan 2.2 A14B: 8x8 pixels, and 4 frames in Wan's, are one latent of 16 channels.
WAN_VAE: dict[str, Any] = {"base_dim": 4, "z_dim": 16, "dim_mult": [1, 2, 4, 4], "num_res_blocks": 1}
# The editing pipelines bring every input to 1024 x 1024 pixels, or as many: 7 s in a tiny checkpoint too. With 16x16
# pixels a latent, and without residual blocks in the encoder, it is 1 s.
EDIT_VAE: dict[str, Any] = {
    "base_dim": 4,
    "z_dim": 16,
    "dim_mult": [1] * 5,
    "num_res_blocks": 0,
    "temperal_downsample": [False, True, True, False],
}


def make_qwen_image() -> DiffusionPipeline:
    """Qwen/Qwen-Image."""
    import diffusers

    return diffusers.QwenImagePipeline(**make_qwen_image_parts(diffusers.QwenImagePipeline, WAN_VAE))


def make_qwen_image_edit() -> DiffusionPipeline:
    """Qwen/Qwen-Image-Edit."""
    import diffusers

    parts = make_qwen_image_parts(diffusers.QwenImageEditPipeline, EDIT_VAE)
    return diffusers.QwenImageEditPipeline(**parts, processor=tiny_text.make_qwen_vl_processor(parts["tokenizer"]))


def make_qwen_image_edit_plus() -> DiffusionPipeline:
    """Qwen/Qwen-Image-Edit-2511: of several images."""
    import diffusers

    parts = make_qwen_image_parts(diffusers.QwenImageEditPlusPipeline, EDIT_VAE, zero_cond_t=True)
    return diffusers.QwenImageEditPlusPipeline(**parts, processor=tiny_text.make_qwen_vl_processor(parts["tokenizer"]))


def make_qwen_image_parts(pipeline_class: Any, vae_config: dict[str, Any], **config: Any) -> dict[str, Any]:
    """What the pipelines of Qwen-Image have in common; ``config`` is of the transformer."""
    import diffusers

    names = inspect.signature(pipeline_class).parameters
    tokenizer = tiny_text.make_qwen_tokenizer(pipeline_class(**dict.fromkeys(names)).prompt_template_encode)
    return {
        "scheduler": diffusers.FlowMatchEulerDiscreteScheduler(
            base_image_seq_len=256,
            base_shift=0.5,
            max_image_seq_len=8192,
            max_shift=0.9,
            shift_terminal=0.02,
            use_dynamic_shifting=True,
        ),
        "vae": diffusers.AutoencoderKLQwenImage(**vae_config),
        "text_encoder": tiny_text.make_qwen_vl(tokenizer),
        "tokenizer": tokenizer,
        "transformer": diffusers.QwenImageTransformer2DModel(
            in_channels=64,
            out_channels=16,
            num_layers=2,
            num_attention_heads=2,
            attention_head_dim=32,
            axes_dims_rope=(8, 12, 12),
            joint_attention_dim=32,
            **config,
        ),
    }


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


def make_flux_vae(**config: Any) -> Any:
    """8x8 pixels are one latent of 16 channels, in the layout of FLUX.1's; Z-Image and SD3 have it too."""
    import diffusers

    config = {"scaling_factor": 0.3611, "shift_factor": 0.1159} | config
    return diffusers.AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        block_out_channels=(8, 8, 16, 16),
        layers_per_block=1,
        latent_channels=16,
        norm_num_groups=4,
        sample_size=1024,
        use_quant_conv=False,
        use_post_quant_conv=False,
        **config,
    )


def make_z_image() -> DiffusionPipeline:
    """Tongyi-MAI/Z-Image-Turbo."""
    import diffusers

    tokenizer = tiny_text.make_qwen_tokenizer()
    tokenizer.chat_template = tiny_text.QWEN_CHAT_TEMPLATE
    return diffusers.ZImagePipeline(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0),
        vae=make_flux_vae(),
        text_encoder=tiny_text.make_qwen3(tokenizer),
        tokenizer=tokenizer,
        transformer=diffusers.ZImageTransformer2DModel(
            in_channels=16,
            dim=64,
            n_layers=2,
            n_refiner_layers=1,
            n_heads=2,
            n_kv_heads=2,
            cap_feat_dim=32,
            axes_dims=[8, 12, 12],
        ),
    )


def make_flux() -> DiffusionPipeline:
    """black-forest-labs/FLUX.1-dev, whose guidance is an input of the transformer."""
    import diffusers

    tokenizer, tokenizer_2 = tiny_text.make_clip_tokenizer(), tiny_text.make_t5_tokenizer()
    return diffusers.FluxPipeline(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(
            base_image_seq_len=256,
            base_shift=0.5,
            max_image_seq_len=4096,
            max_shift=1.15,
            shift=3.0,
            use_dynamic_shifting=True,
        ),
        vae=make_flux_vae(),
        text_encoder=tiny_text.make_clip(tokenizer),
        tokenizer=tokenizer,
        text_encoder_2=tiny_text.make_t5(tokenizer_2),
        tokenizer_2=tokenizer_2,
        transformer=diffusers.FluxTransformer2DModel(
            in_channels=64,
            num_layers=2,
            num_single_layers=2,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=32,
            pooled_projection_dim=32,
            guidance_embeds=True,
            axes_dims_rope=(4, 6, 6),
        ),
    )


def make_sd3() -> DiffusionPipeline:
    """stabilityai/stable-diffusion-3.5-medium. Up to 512 x 512: the checkpoint holds an embedding for each position."""
    import diffusers

    tokenizers = [tiny_text.make_clip_tokenizer() for _ in range(2)]
    tokenizer_3 = tiny_text.make_t5_tokenizer()
    return diffusers.StableDiffusion3Pipeline(
        transformer=diffusers.SD3Transformer2DModel(
            sample_size=32,
            pos_embed_max_size=32,
            patch_size=2,
            in_channels=16,
            out_channels=16,
            num_layers=3,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=64,
            caption_projection_dim=32,
            pooled_projection_dim=64,
            dual_attention_layers=(0,),
            qk_norm="rms_norm",
        ),
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0),
        vae=make_flux_vae(scaling_factor=1.5305, shift_factor=0.0609),
        text_encoder=tiny_text.make_clip(tokenizers[0], projection=True),
        tokenizer=tokenizers[0],
        text_encoder_2=tiny_text.make_clip(tokenizers[1], projection=True, hidden_act="gelu"),
        tokenizer_2=tokenizers[1],
        # The encodings of the two CLIPs, side by side and filled up with zeros, follow T5's: it must not be narrower.
        text_encoder_3=tiny_text.make_t5(tokenizer_3, width=64),
        tokenizer_3=tokenizer_3,
    )


def make_stable_audio() -> DiffusionPipeline:
    """stabilityai/stable-audio-open-1.0, for 16 latents: 0.74 s at 44.1 kHz. The pipeline computes all, always."""
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


def make_wan22_i2v() -> DiffusionPipeline:
    """Wan-AI/Wan2.2-I2V-A14B-Diffusers: the transformers see 16 latent channels, 16 of the image and 4 of a mask."""
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


MAKERS: dict[str, Callable[[], DiffusionPipeline]] = {
    "flux": make_flux,
    "hunyuan-video": make_hunyuan_video,
    "qwen-image": make_qwen_image,
    "qwen-image-edit": make_qwen_image_edit,
    "qwen-image-edit-plus": make_qwen_image_edit_plus,
    "sd3": make_sd3,
    "stable-audio": make_stable_audio,
    "wan2.2-i2v": make_wan22_i2v,
    "wan2.2-t2v": make_wan22_t2v,
    "z-image": make_z_image,
}
