"""Tiny random checkpoints in the layout of real ones, built offline in seconds, for tests and demonstrations.

``qwen2_5_omni.build(path)``
    Qwen2.5-Omni with thinker, talker and vocoder; ``VARIANTS`` of its shape, or a ``TinyShape`` of your own.
``qwen3_omni.build(path)``
    Qwen3-Omni with thinker, talker and vocoder, or (variant "thinker") the thinker alone.
``diffusion.build(path, name)``
    A diffusers pipeline, one of ``diffusion.PIPELINES``: images, videos, sounds.
``llava.build(path)``
    LLaVA-1.5: text from text and images.

Each loads with transformers, diffusers and vLLM as the real checkpoint does, and its weights are scaled so that a wrong
input shows in the output. The same arguments write the same bytes. On the command line: ``vllm-omni tiny NAME DIR``.
"""
