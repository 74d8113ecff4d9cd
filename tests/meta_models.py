"""Models of vLLM without memory, on torch's meta device."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from vllm.model_executor.layers import rotary_embedding


@contextmanager
def on_meta_device() -> Iterator[None]:
    """Make models without memory. vLLM would give their rotary embeddings to later models of this process."""
    with pytest.MonkeyPatch.context() as patch, torch.device("meta"):
        patch.setattr(rotary_embedding, "_ROPE_DICT", {})
        yield
