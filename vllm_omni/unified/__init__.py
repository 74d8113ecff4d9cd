"""Pictures that a language model denoises as tokens of its own sequences; no vLLM.

From: Omni-Flow, section 5.3 (diffusion steps as sequences of the language model's engine).
"""
