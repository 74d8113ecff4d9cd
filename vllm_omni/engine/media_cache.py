"""The cache of processed media of a stage with several instances."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from vllm.config import ModelConfig
from vllm.multimodal.cache import MultiModalProcessorOnlyCache
from vllm.renderers.base import BaseRenderer


@contextmanager
def keep_media_in_front_end(model_config: ModelConfig, renderer: Callable[[], BaseRenderer]) -> Iterator[None]:
    """Start an instance inside the block without upstream's cache, and give its renderer one of the front end alone.

    Prompts of a stage with several instances are rendered once, by one of them. Upstream's cache leaves out media that
    it has sent before, to whichever instance that was.
    """
    multimodal = model_config.multimodal_config
    num_gb = 0.0 if multimodal is None else multimodal.mm_processor_cache_gb
    if multimodal is None or num_gb <= 0:
        yield
        return
    multimodal.mm_processor_cache_gb = 0.0
    yield
    multimodal.mm_processor_cache_gb = num_gb
    renderer()._mm_processor_cache = MultiModalProcessorOnlyCache(model_config)
