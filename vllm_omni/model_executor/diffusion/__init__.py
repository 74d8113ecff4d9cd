"""Unmodified diffusers pipelines, several requests at a time: works without vLLM."""
