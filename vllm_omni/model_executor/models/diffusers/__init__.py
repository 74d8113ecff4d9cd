"""Diffusers pipelines, each served as one stage."""
