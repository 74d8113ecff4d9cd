"""Diffusers pipelines whose denoiser calls are put into batches. Works without vLLM."""
