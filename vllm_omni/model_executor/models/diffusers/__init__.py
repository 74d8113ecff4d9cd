"""Pipelines of the diffusers library, as one stage each."""
