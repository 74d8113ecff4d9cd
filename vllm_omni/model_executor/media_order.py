"""Embeddings of media in the order of their tokens, where a video and its audio alternate in a prompt.

vLLM gives a model the embeddings of a step item by item. Its Omni thinkers tell that two items alternate by the tokens
of the step; of a prompt in chunks, a step may have only the end of a piece of audio and the video behind it, which
then looks like two items in the order of the prompt. Embeddings that already are in the order of their tokens are
right either way.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from vllm.multimodal.utils import get_mm_embedding_modalities, set_mm_embedding_modality

BOTH = {"audio", "video"}


def in_token_order(
    embeddings: Sequence[torch.Tensor] | None,
    input_ids: torch.Tensor,
    is_multimodal: torch.Tensor | None,
    modalities: Mapping[int, str],
) -> Sequence[torch.Tensor] | None:
    """Cut a step's embeddings at each change of the medium, and sort them as their tokens are.

    Args:
        embeddings: of each item [n, size]; the sizes of two media may differ.
        input_ids: [num_tokens].
        is_multimodal: which tokens have an embedding, [num_tokens], on the host.
        modalities: id of a medium's token -> its name.

    Raises:
        ValueError: a medium has more or fewer embeddings than tokens.
    """
    if not embeddings or is_multimodal is None:
        return embeddings
    of_items = get_mm_embedding_modalities(embeddings)
    if not set(of_items) >= BOTH:
        return embeddings
    left = {
        name: torch.cat([one for one, modality in zip(embeddings, of_items, strict=True) if modality == name])
        for name in set(of_items)
    }
    ordered = []
    runs, lengths = torch.unique_consecutive(input_ids.cpu()[is_multimodal], return_counts=True)
    for token, length in zip(runs.tolist(), lengths.tolist(), strict=True):
        name = modalities.get(token, "")
        if name not in left or len(left[name]) < length:
            raise ValueError(f"{length} tokens of {name or token}, and {len(left.get(name, ()))} embeddings are left")
        ordered.append(set_mm_embedding_modality(left[name][:length], name))
        left[name] = left[name][length:]
    if more := [f"{len(one)} of {name}" for name, one in left.items() if len(one)]:
        raise ValueError(f"embeddings without a token: {', '.join(more)}")
    return ordered
