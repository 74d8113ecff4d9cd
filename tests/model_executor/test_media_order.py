"""Each embedding comes to its token, whatever chunk of a video with its audio a step has."""

import pytest
import torch
from vllm.multimodal.utils import get_mm_embedding_modalities, set_mm_embedding_modality

from vllm_omni.model_executor.media_order import in_token_order

TEXT, AUDIO, IMAGE, VIDEO = range(4)
MODALITIES = {AUDIO: "audio", IMAGE: "image", VIDEO: "video"}
# An image, a video of two pieces with its audio, and another request's audio behind it.
IDS = torch.tensor([TEXT, IMAGE, IMAGE, TEXT, VIDEO, VIDEO, AUDIO, AUDIO, VIDEO, VIDEO, AUDIO, TEXT, AUDIO, AUDIO])
WIDTHS = {"audio": 1, "image": 2, "video": 2}


def items(start: int, end: int, order: tuple[int, ...]) -> list[torch.Tensor]:
    """What vLLM gathers of the tokens from ``start`` to ``end``: an embedding has the number of its token."""
    made = []
    for token in order:
        places = [index for index in range(start, end) if IDS[index] == token]
        if places:
            name = MODALITIES[token]
            rows = torch.tensor(places, dtype=torch.float32)[:, None].expand(-1, WIDTHS[name])
            made.append(set_mm_embedding_modality(rows.clone(), name))
    return made


@pytest.mark.parametrize("order", [(IMAGE, VIDEO, AUDIO), (IMAGE, AUDIO, VIDEO)])
def test_every_chunk_has_its_embeddings_in_the_order_of_its_tokens(order: tuple[int, ...]) -> None:
    for start in range(len(IDS)):
        for end in range(start + 1, len(IDS) + 1):
            given, ids = items(start, end, order), IDS[start:end]
            if {"audio", "video"} - {one.modality for one in given}:  # type: ignore[attr-defined]
                continue
            ordered = in_token_order(given, ids, ids != TEXT, MODALITIES)
            assert ordered is not None
            places = [int(row[0]) for one in ordered for row in one]
            assert places == [index for index in range(start, end) if IDS[index] != TEXT]
            names = [name for name, one in zip(get_mm_embedding_modalities(ordered), ordered, strict=True) for _ in one]
            assert names == [MODALITIES[int(IDS[place])] for place in places]


def test_media_of_which_none_takes_turns_stay_as_they_are() -> None:
    given = items(0, 6, (IMAGE, VIDEO))
    assert in_token_order(given, IDS[:6], IDS[:6] != TEXT, MODALITIES) is given
    assert in_token_order(None, IDS, None, MODALITIES) is None


@pytest.mark.parametrize("end", [10, 12, 14])
def test_another_number_of_embeddings_than_tokens_is_an_error(end: int) -> None:
    ids = IDS[:13]
    if end == 12:
        ids = IDS[:12]
        given = items(0, 14, (IMAGE, VIDEO, AUDIO))
    else:
        given = items(0, end, (IMAGE, VIDEO, AUDIO))
    with pytest.raises(ValueError, match="embeddings"):
        in_token_order(given, ids, ids != TEXT, MODALITIES)
