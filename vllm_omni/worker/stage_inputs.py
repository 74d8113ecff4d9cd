"""Read what earlier stages have published as inputs of a diffusers pipeline.

A request names them in its stage arguments: ``payloads``, and ``inputs``, which maps arguments of the pipeline to keys
in the payloads. Tensors of one key in several payloads are joined along their first dimension, as rows that came one
after the other.
"""

from __future__ import annotations

from typing import Any

import torch
from msgspec import structs

from vllm_omni.diffusion.request import DiffusionRequest
from vllm_omni.errors import RelayBroken
from vllm_omni.media.image import to_image
from vllm_omni.messages.payload import decode
from vllm_omni.names import suggest
from vllm_omni.relay.hub import RelayHub

IMAGE = "image"
"""The input that becomes the request's images; others are arguments of the pipeline by their own names."""


def pull_inputs(request: DiffusionRequest, hub: RelayHub) -> DiffusionRequest:
    """The request with the tensors of its inputs, owned by the caller; ``image``: uint8 [N, H, W, 3].

    Raises:
        RelayError: a payload cannot be pulled, or does not have a key.
    """
    if not request.payloads:
        return request
    payloads = [decode(data) for data in request.payloads]
    try:
        trees = [hub.pull_blocking(payload) for payload in payloads]
        # Copies: the producer's memory is free again once it is released.
        tensors = {name: _join(trees, key).clone() for name, key in request.inputs.items()}
    finally:
        for payload in payloads:
            hub.release_payload(payload)
    images = [*request.images, *(to_image(pixels.cpu()) for pixels in tensors.pop(IMAGE, ()))]
    return structs.replace(request, images=images, tensors=tensors, payloads=[])


def _join(trees: list[dict[str, Any]], key: str) -> torch.Tensor:
    found = [tree[key] for tree in trees if isinstance(tree.get(key), torch.Tensor)]
    if not found:
        known = sorted({name for tree in trees for name, value in tree.items() if isinstance(value, torch.Tensor)})
        raise RelayBroken(f"the payloads of the previous stage have no tensor {key!r}: {suggest(key, known)}")
    return found[0] if len(found) == 1 else torch.cat(found)
