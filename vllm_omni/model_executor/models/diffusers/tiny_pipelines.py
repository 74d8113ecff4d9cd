"""One function for each tiny pipeline: the real classes and settings, narrow and shallow.

Weights are those of construction; ``tiny.build`` overwrites them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from vllm_omni.model_executor.models.diffusers import tiny_text

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline

# Of Qwen-Image, Wan 2.1 and Wan 2.2 A14B: 8x8 pixels, and 4 frames in Wan's, are one latent of 16 channels.
WAN_VAE: dict[str, Any] = {"base_dim": 4, "z_dim": 16, "dim_mult": [1, 2, 4, 4], "num_res_blocks": 1}


def make_qwen_image() -> DiffusionPipeline:
    """Qwen/Qwen-Image."""
    import diffusers

    none = dict.fromkeys(("scheduler", "vae", "text_encoder", "tokenizer", "transformer"))
    template = diffusers.QwenImagePipeline(**none).prompt_template_encode
    tokenizer = tiny_text.make_qwen_tokenizer(template)
    text_encoder = tiny_text.make_qwen_vl(tokenizer)
    return diffusers.QwenImagePipeline(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(
            base_image_seq_len=256,
            base_shift=0.5,
            max_image_seq_len=8192,
            max_shift=0.9,
            shift_terminal=0.02,
            use_dynamic_shifting=True,
        ),
        vae=diffusers.AutoencoderKLQwenImage(**WAN_VAE),
        text_encoder=text_encoder,
        tokenizer=tokenizer,
        transformer=diffusers.QwenImageTransformer2DModel(
            in_channels=64,
            out_channels=16,
            num_layers=2,
            num_attention_heads=2,
            attention_head_dim=32,
            axes_dims_rope=(8, 12, 12),
            joint_attention_dim=32,
        ),
    )


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


MAKERS: dict[str, Callable[[], DiffusionPipeline]] = {
    "qwen-image": make_qwen_image,
    "wan2.2-t2v": make_wan22_t2v,
}
