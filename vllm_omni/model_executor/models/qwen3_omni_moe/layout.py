"""``TalkerLayout``: which tokens of the thinker the talker reads, found in the thinker's prompt.

The talker reads the user's turns and the last turn of the assistant; others are left out. At media it reads the
thinker's rows after a layer, elsewhere embeddings.

From: transformers' ``Qwen3OmniMoeForConditionalGeneration.generate``, step 2.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from transformers import PreTrainedConfig

from vllm_omni.errors import InvalidRequest
from vllm_omni.messages.token_names import Part, TokenNames

NUM_HEADER_TOKENS = 3  # <|im_start|>, the role, a line break
NUM_ADDED_TOKENS = 6  # of the talker's prompt behind the header: four tags, a pad, the first token of the reply

Span = tuple[int, int]  # [start, end)


class TalkerLayout(NamedTuple):
    """Spans of the thinker's prompt.

    Attributes:
        turns: the user's.
        media: placeholders within them.
        flat: parts of them whose positions the talker counts up (see ``make_layout``).
        reply_start: the first token behind the header of the assistant's last turn.
    """

    turns: list[Span]
    media: list[Span]
    flat: list[Span]
    reply_start: int

    @property
    def num_prompt_tokens(self) -> int:
        """Of the talker: the turns, the header, tags, and one token of the reply."""
        return sum(end - start for start, end in self.turns) + NUM_HEADER_TOKENS + NUM_ADDED_TOKENS


def make_layout(prompt_ids: Sequence[int], config: PreTrainedConfig) -> TalkerLayout:
    """Find the spans in a prompt whose placeholders are expanded.

    The talker was published with code that does not know that a video has its audio inside: if no picture and no other
    video follows, it counts through the interleaved tokens as if they were text.

    Args:
        config: the checkpoint's.

    Raises:
        InvalidRequest: the prompt has no turn of the assistant.
    """
    ids = np.asarray(prompt_ids)
    thinker = config.thinker_config
    starts = np.flatnonzero(ids[:-1] == config.im_start_token_id)
    roles = ids[starts + 1]
    assistants = starts[roles == config.assistant_token_id]
    if not len(assistants):
        raise InvalidRequest("the prompt has no turn of the assistant, which the model would speak")
    ends = np.append(starts[1:], len(ids))
    turns = [
        (int(start), int(end))
        for start, end, role in zip(starts, ends, roles, strict=True)
        if role == config.user_token_id
    ]
    of_user = np.zeros(len(ids), bool)
    for start, end in turns:
        of_user[start:end] = True
    is_media = np.isin(ids, [thinker.audio_token_id, thinker.image_token_id, thinker.video_token_id]) & of_user
    # A video with its audio: <|vision_start|><|audio_start|> ... <|audio_end|><|vision_end|>.
    followers = np.where(of_user[1:], ids[1:], -1)
    visions = np.flatnonzero(ids[:-1] == thinker.vision_start_token_id)
    others = [one for one in visions if followers[one] in (thinker.image_token_id, thinker.video_token_id)]
    last_other = max(others, default=-1)
    audio_ends = np.flatnonzero(ids == thinker.audio_end_token_id)
    flat = [
        (int(one) + 1, int(audio_ends[np.searchsorted(audio_ends, one)]) + 1)
        for one in visions
        if followers[one] == thinker.audio_start_token_id and one > last_other
    ]
    return TalkerLayout(turns, _spans(is_media), flat, int(assistants[-1]) + NUM_HEADER_TOKENS)


def _spans(mask: np.ndarray) -> list[Span]:
    """The runs of true values."""
    edges = np.flatnonzero(np.diff(np.concatenate(([False], mask, [False])).astype(np.int8)))
    return [(int(start), int(end)) for start, end in edges.reshape(-1, 2)]


def talker_names(names: TokenNames, layout: TalkerLayout) -> TokenNames:
    """Names of the talker's rows: those of the user's turns, and of the header.

    At media a row depends on all that the thinker has read before. Elsewhere it is an embedding, but its position may
    depend on what follows (``TalkerLayout.flat``).

    Args:
        names: of the thinker's prompt.
    """
    ids: list[int] = []
    parts: list[Part] = []
    for start, end in layout.turns:
        place = len(ids) - start  # of the talker's token, from that of the thinker's
        media = [(one, names.digest(one[1])) for one in layout.media if start <= one[0] < end]
        counted = [(one, "counted") for one in layout.flat if start <= one[0] < end]
        parts += [Part(place + first, last - first, name) for (first, last), name in sorted(media + counted)]
        ids += names.token_ids[start:end]
    ids += names.token_ids[layout.reply_start - NUM_HEADER_TOKENS : layout.reply_start]
    return TokenNames(ids, parts, names.salt)


def talker_positions(positions: np.ndarray, layout: TalkerLayout) -> np.ndarray:
    """The talker's M-RoPE positions.

    A turn starts with text behind all that came before it, so within it the thinker's positions only move.

    Args:
        positions: the thinker's, int64 [3, num_tokens].

    Returns:
        int64 [3, num_prompt_tokens].
    """
    parts: list[np.ndarray] = []
    position = 0

    def add(part: np.ndarray) -> None:
        nonlocal position
        parts.append(part + position)
        position = int(parts[-1].max()) + 1

    def count(num_tokens: int) -> None:
        add(np.broadcast_to(np.arange(num_tokens), (3, num_tokens)))

    for start, end in layout.turns:
        for flat_start, flat_end in (one for one in layout.flat if start <= one[0] < end):
            add(positions[:, start:flat_start] - positions[:, start : start + 1])
            count(flat_end - flat_start)
            start = flat_end
        if start < end:
            add(positions[:, start:end] - positions[:, start : start + 1])
    count(NUM_HEADER_TOKENS + NUM_ADDED_TOKENS)
    return np.concatenate(parts, axis=1)
