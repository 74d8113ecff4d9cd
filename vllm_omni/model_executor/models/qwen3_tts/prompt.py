"""``TalkerPrompt``: which text and codec ids stand at each position of the talker's prompt.

    position        text                            codec
    instruction     its ids                         -
    role            <|im_start|> assistant \\n       -
    tags            tts_pad ...                     nothink think_bos think_eos, or think think_bos LANGUAGE think_eos
    speaker         tts_pad                         its id; of a cloned voice, its x-vector
                    tts_bos                         pad
    text, streamed  its first id                    bos; the others follow with the frames, then tts_eos
    text, whole     its ids, tts_eos                pad ...
                    tts_pad                         bos

Of a cloned voice with a transcript, the last part is, with R the transcript's ids:

    streamed        R, its ids, tts_eos             bos, the recording's frames: side by side, the shorter text padded
                                                    with tts_pad; a longer one follows with the frames
    whole           R, its ids, tts_eos             pad ...
                    tts_pad ...                     bos, the recording's frames

From: the published checkpoints' code (package ``qwen-tts`` 0.1.1).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any, NamedTuple

from vllm_omni.errors import InvalidRequest
from vllm_omni.names import suggest

NOTHING = -1  # in the place of an id
AUTO = "auto"


class TalkerPrompt(NamedTuple):
    text_ids: list[int]
    codec_ids: list[int]  # as many
    tail_ids: list[int]  # text of the decode steps, one by one
    x_vector_at: int | None = None  # the position of a cloned voice
    frames_at: int | None = None  # the first position of a recording's frames


class ClonedVoice(NamedTuple):
    """What a prompt needs to know of a recording."""

    transcript_ids: Sequence[int] = ()
    num_frames: int = 0  # 0: the x-vector alone


class PromptMaker:
    """Makes prompts for one checkpoint.

    Args:
        config: the checkpoint's config.json.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        talker = config["talker_config"]
        self._text = {name: config[f"tts_{name}_token_id"] for name in ("pad", "bos", "eos")}
        names = ("pad", "bos", "think", "nothink", "think_bos", "think_eos")
        self._codec = {name: talker[f"codec_{name}_id"] for name in names}
        self._language_ids: Mapping[str, int] = talker["codec_language_id"]
        self._dialects: Mapping[str, str | bool] = talker.get("spk_is_dialect") or {}
        self.speakers: Mapping[str, int] = talker.get("spk_id") or {}
        self.languages = [AUTO, *(name for name in self._language_ids if "dialect" not in name)]

    def make(
        self,
        role_ids: Sequence[int],
        body_ids: Sequence[int],
        *,
        language: str = AUTO,
        speaker: str | None = None,
        voice: ClonedVoice | None = None,
        instruction_ids: Sequence[int] = (),
        is_streamed: bool = False,
    ) -> TalkerPrompt:
        """Put the ids of a text, of its role and of an instruction in their places.

        Args:
            body_ids: of the text to speak, at least one.
            voice: a cloned voice, instead of a speaker.
            is_streamed: the text follows with the frames, so that the prompt does not grow with it.

        Raises:
            InvalidRequest: no text, or an unknown language or speaker.
        """
        if not body_ids:
            raise InvalidRequest("there is no text to speak")
        text, codec = self._text, self._codec
        pairs = [(token, NOTHING) for token in (*instruction_ids, *role_ids)]
        tags = self._tags(self._language_id(language.lower(), speaker and speaker.lower()))
        if speaker:
            if speaker.lower() not in self.speakers:
                raise InvalidRequest(f"unknown speaker {speaker!r}: {suggest(speaker, self.speakers)}")
            tags.append(self.speakers[speaker.lower()])
        pairs += [(text["pad"], tag) for tag in tags]
        x_vector_at = None
        if voice is not None:
            x_vector_at = len(pairs)
            pairs.append((text["pad"], NOTHING))
        pairs.append((text["bos"], codec["pad"]))
        spoken = [*(() if voice is None else voice.transcript_ids), *body_ids, text["eos"]]
        heard = [codec["bos"], *[NOTHING] * (0 if voice is None else voice.num_frames)]
        tail: list[int] = []
        if is_streamed:
            spoken, tail = spoken[: len(heard)], spoken[len(heard) :]
            frames_at = len(pairs) + 1
            pairs += zip_longest(spoken, heard, fillvalue=text["pad"])  # the text is never the longer
        else:
            pairs += [(token, codec["pad"]) for token in spoken]
            frames_at = len(pairs) + 1
            pairs += [(text["pad"], token) for token in heard]
        text_ids, codec_ids = (list(ids) for ids in zip(*pairs, strict=True))
        return TalkerPrompt(text_ids, codec_ids, tail, x_vector_at, frames_at if len(heard) > 1 else None)

    def _tags(self, language_id: int | None) -> list[int]:
        codec = self._codec
        if language_id is None:
            return [codec["nothink"], codec["think_bos"], codec["think_eos"]]
        return [codec["think"], codec["think_bos"], language_id, codec["think_eos"]]

    def _language_id(self, language: str, speaker: str | None) -> int | None:
        """A speaker of a dialect speaks it where the language is Chinese or left open."""
        if language not in self.languages:
            raise InvalidRequest(f"unknown language {language!r}: {suggest(language, self.languages)}")
        dialect = self._dialects.get(speaker) if speaker else None
        if isinstance(dialect, str) and language in (AUTO, "chinese"):
            return self._language_ids[dialect]
        return self._language_ids.get(language)
