"""Makers of the tiny pipelines for images: real classes and settings, few and narrow layers.

Weights are those of construction; ``tiny.build`` overwrites them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from vllm_omni.testing import diffusion_text as tiny_text

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline

# VAE of Qwen-Image, Wan 2.1 and Wan 2.2 A14B: 8x8 pixels, and 4 frames in Wan's, are one latent of 16 channels.
WAN_VAE: dict[str, Any] = {"base_dim": 4, "z_dim": 16, "dim_mult": [1, 2, 4, 4], "num_res_blocks": 1}
# The editing pipelines scale every input to about 1024 x 1024 pixels, which takes 7 s even in a tiny checkpoint; with
# 16x16 pixels per latent and no residual blocks in the encoder, 1 s.
EDIT_VAE: dict[str, Any] = {
    "base_dim": 8,
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
    """Qwen/Qwen-Image-Edit-2511, for several images."""
    import diffusers

    parts = make_qwen_image_parts(diffusers.QwenImageEditPlusPipeline, EDIT_VAE, zero_cond_t=True)
    return diffusers.QwenImageEditPlusPipeline(**parts, processor=tiny_text.make_qwen_vl_processor(parts["tokenizer"]))


def make_qwen_image_parts(pipeline_class: Any, vae_config: dict[str, Any], **config: Any) -> dict[str, Any]:
    """Components that the pipelines of Qwen-Image share; ``config`` is of the transformer."""
    import diffusers

    tokenizer = make_tokenizer_of(pipeline_class)
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


def make_tokenizer_of(pipeline_class: Any) -> Any:
    """Make Qwen's tokenizer with the words of the class's own prompt template."""
    names = inspect.signature(pipeline_class).parameters
    return tiny_text.make_qwen_tokenizer(pipeline_class(**dict.fromkeys(names)).prompt_template_encode)


def make_flux_vae(**config: Any) -> Any:
    """VAE of FLUX.1, Z-Image and SD3: 8x8 pixels are one latent of 16 channels."""
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
        # The encodings of the two CLIPs, concatenated and padded with zeros, follow T5's, which must not be narrower.
        text_encoder_3=tiny_text.make_t5(tokenizer_3, width=64),
        tokenizer_3=tokenizer_3,
    )


def make_flux2_klein() -> DiffusionPipeline:
    """black-forest-labs/FLUX.2-klein-4B, distilled: without guidance."""
    import diffusers

    tokenizer = tiny_text.make_qwen_tokenizer()
    tokenizer.chat_template = tiny_text.QWEN_CHAT_TEMPLATE
    return diffusers.Flux2KleinPipeline(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(
            base_image_seq_len=256,
            base_shift=0.5,
            max_image_seq_len=4096,
            max_shift=1.15,
            shift=3.0,
            use_dynamic_shifting=True,
        ),
        vae=diffusers.AutoencoderKLFlux2(block_out_channels=(8, 8, 16, 16), layers_per_block=1, norm_num_groups=4),
        # The pipeline concatenates the hidden states after layers 9, 18 and 27.
        text_encoder=tiny_text.make_qwen3(tokenizer, causal=True, num_hidden_layers=27, hidden_size=16),
        tokenizer=tokenizer,
        transformer=diffusers.Flux2Transformer2DModel(
            in_channels=128,
            num_layers=2,
            num_single_layers=2,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=3 * 16,
            axes_dims_rope=(4, 4, 4, 4),
            guidance_embeds=False,
        ),
        is_distilled=True,
    )


def make_longcat_image() -> DiffusionPipeline:
    """meituan-longcat/LongCat-Image. ``enable_prompt_rewrite=False`` skips a rewrite by the (random) encoder."""
    import diffusers

    tokenizer = tiny_text.make_qwen_tokenizer()
    return diffusers.LongCatImagePipeline(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(
            base_image_seq_len=256,
            base_shift=0.5,
            max_image_seq_len=4096,
            max_shift=1.15,
            shift=3.0,
            use_dynamic_shifting=True,
        ),
        vae=make_flux_vae(),
        text_encoder=tiny_text.make_qwen_vl(tokenizer),
        tokenizer=tokenizer,
        text_processor=tiny_text.make_qwen_vl_processor(tokenizer),
        transformer=diffusers.LongCatImageTransformer2DModel(
            in_channels=64,
            num_layers=2,
            num_single_layers=2,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=32,
            pooled_projection_dim=32,
            axes_dims_rope=[4, 6, 6],
        ),
    )


def make_hunyuan_image() -> DiffusionPipeline:
    """hunyuanvideo-community/HunyuanImage-2.1-Diffusers: its guidance is a component with a state of its own."""
    import diffusers

    pipeline_class = diffusers.HunyuanImagePipeline
    tokenizer, tokenizer_2 = make_tokenizer_of(pipeline_class), tiny_text.make_byt5_tokenizer()
    return pipeline_class(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=5.0),
        vae=diffusers.AutoencoderKLHunyuanImage(
            in_channels=3,
            out_channels=3,
            latent_channels=16,
            # 32 is the least for norms of 32 groups; the real one's 64 latent channels need 128.
            block_out_channels=(32,) * 6,
            layers_per_block=1,
            spatial_compression_ratio=32,
            sample_size=384,
            scaling_factor=0.75289,
        ),
        # The pipeline reads the third hidden state from the end.
        text_encoder=tiny_text.make_qwen_vl(tokenizer, num_hidden_layers=3),
        tokenizer=tokenizer,
        text_encoder_2=tiny_text.make_t5(tokenizer_2),
        tokenizer_2=tokenizer_2,
        transformer=diffusers.HunyuanImageTransformer2DModel(
            in_channels=16,
            out_channels=16,
            num_attention_heads=2,
            attention_head_dim=16,
            num_layers=2,
            num_single_layers=2,
            num_refiner_layers=1,
            text_embed_dim=32,
            # No projection of the second encoding, which would be 16 MB at any width: it is as wide as the transformer.
            text_embed_2_dim=None,
            rope_axes_dim=(8, 8),
        ),
        guider=diffusers.AdaptiveProjectedMixGuidance(adaptive_projected_guidance_start_step=5),
        ocr_guider=diffusers.AdaptiveProjectedMixGuidance(adaptive_projected_guidance_start_step=38),
    )


def make_sana() -> DiffusionPipeline:
    """Efficient-Large-Model/Sana_1600M_1024px_diffusers; ``use_resolution_binning=False`` for less than 1024 x 1024."""
    import diffusers

    tokenizer = tiny_text.make_gemma_tokenizer()
    blocks = ("ResBlock",) * 3 + ("EfficientViTBlock",) * 3
    channels, layers, scales = (8, 8, 16, 16, 32, 32), (1,) * 6, ((),) * 3 + ((5,),) * 3
    return diffusers.SanaPipeline(
        tokenizer=tokenizer,
        text_encoder=tiny_text.make_gemma2(tokenizer),
        vae=diffusers.AutoencoderDC(
            attention_head_dim=8,
            encoder_block_types=blocks,
            decoder_block_types=blocks,
            encoder_block_out_channels=channels,
            decoder_block_out_channels=channels,
            encoder_layers_per_block=layers,
            decoder_layers_per_block=layers,
            encoder_qkv_multiscales=scales,
            decoder_qkv_multiscales=scales,
            upsample_block_type="interpolate",
            downsample_block_type="conv",
            scaling_factor=0.41407,
        ),
        transformer=diffusers.SanaTransformer2DModel(
            num_attention_heads=2,
            attention_head_dim=16,
            num_layers=2,
            num_cross_attention_heads=2,
            cross_attention_head_dim=16,
            cross_attention_dim=32,
            caption_channels=32,
        ),
        scheduler=diffusers.DPMSolverMultistepScheduler(
            prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0
        ),
    )


MAKERS: dict[str, Callable[[], DiffusionPipeline]] = {
    "flux": make_flux,
    "flux2-klein": make_flux2_klein,
    "hunyuan-image": make_hunyuan_image,
    "longcat-image": make_longcat_image,
    "qwen-image": make_qwen_image,
    "qwen-image-edit": make_qwen_image_edit,
    "qwen-image-edit-plus": make_qwen_image_edit_plus,
    "sana": make_sana,
    "sd3": make_sd3,
    "z-image": make_z_image,
}
