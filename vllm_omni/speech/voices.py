"""``VoiceStore``: recordings of voices that users have uploaded, in a private directory.

A voice is a folder with two files (``files/private.py``). Servers that share a directory see each other's voices.
"""

from __future__ import annotations

import hashlib
import re
import time
from pathlib import Path
from typing import NamedTuple

import msgspec

from vllm_omni.errors import InvalidRequest, UnknownVoice, VoiceExists
from vllm_omni.files.private import PrivateDirectory, is_full
from vllm_omni.names import suggest

ABOUT, RECORDING = "voice.json", "recording"  # files of a voice

NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,63}")


class Quota(NamedTuple):
    """Of all voices together."""

    max_voices: int
    max_bytes: int


class StoredVoice(msgspec.Struct, frozen=True):
    """What is known of an uploaded voice."""

    name: str
    transcript: str  # of the recording; "": the timbre alone is cloned
    seconds: float
    num_bytes: int
    digest: str  # of the recording's bytes
    created_at: int  # seconds since 1970
    consent: str | None = None  # as its owner has named it


class VoiceStore:
    """Adds, lists and removes voices. Its methods block: they belong in a thread.

    Args:
        directory: created with its parents, for its owner alone.

    Raises:
        ConfigError: it cannot be created, or others may read it.
    """

    def __init__(self, directory: Path, quota: Quota) -> None:
        self.quota = quota
        self.directory = PrivateDirectory(directory, "VLLM_OMNI_VOICES_DIR", "voices")

    def voices(self) -> list[StoredVoice]:
        """All voices, the oldest first."""
        names = filter(NAME.fullmatch, self.directory.names())
        voices = [voice for name in names if (voice := self._read(name)) is not None]
        return sorted(voices, key=lambda voice: (voice.created_at, voice.name))

    def find(self, name: str) -> StoredVoice | None:
        """The voice of a name, if there is one; any text may be asked for."""
        name = name.lower()
        return self._read(name) if NAME.fullmatch(name) else None

    def recording(self, voice: StoredVoice) -> bytes:
        """The file as it was uploaded.

        Raises:
            UnknownVoice: it has been deleted meanwhile.
        """
        try:
            return self.directory.read(voice.name, RECORDING)
        except OSError as exc:
            raise UnknownVoice(f"voice {voice.name!r} has been deleted", param="voice") from exc

    def add(
        self, name: str, recording: bytes, *, seconds: float, transcript: str = "", consent: str | None = None
    ) -> StoredVoice:
        """Store a voice, once ``check_name`` has accepted its name.

        Raises:
            VoiceExists: there is one of this name.
            InvalidRequest: the quota is used up, or the disk is full.
        """
        digest = hashlib.sha256(recording).hexdigest()
        voice = StoredVoice(name, transcript, seconds, len(recording), digest, int(time.time()), consent)
        with self.directory.locked():
            if self.find(name) is not None:
                raise VoiceExists(
                    f"name: there is a voice {name!r}: choose another name, or delete it first", param="name"
                )
            self._check_quota(len(recording))
            self._write(voice, recording)
        return voice

    def delete(self, name: str) -> StoredVoice:
        """Remove a voice.

        Raises:
            UnknownVoice: there is none of this name.
        """
        with self.directory.locked():
            voice = self.find(name)
            if voice is None:
                known = [one.name for one in self.voices()]
                raise UnknownVoice(f"no uploaded voice {name!r}: {suggest(name, known)}", param="name")
            self.directory.remove(voice.name)
        return voice

    def _check_quota(self, num_bytes: int) -> None:
        voices, quota = self.voices(), self.quota
        if len(voices) >= quota.max_voices:
            raise InvalidRequest(
                f"there are {len(voices)} uploaded voices, which is the limit (VLLM_OMNI_MAX_VOICES): delete one first"
            )
        used = sum(voice.num_bytes for voice in voices)
        if used + num_bytes > quota.max_bytes:
            raise InvalidRequest(
                f"the recording has {num_bytes:,} bytes, and the uploaded voices use {used:,} of {quota.max_bytes:,} "
                "(VLLM_OMNI_MAX_VOICE_BYTES): send a shorter or compressed one, or delete a voice first",
                param="audio_sample",
            )

    def _write(self, voice: StoredVoice, recording: bytes) -> None:
        try:
            self.directory.create(voice.name, {RECORDING: recording, ABOUT: msgspec.json.encode(voice)})
        except OSError as exc:
            if is_full(exc):
                raise InvalidRequest(f"the disk of {self.directory.path} is full: delete a voice first") from exc
            raise

    def _read(self, name: str) -> StoredVoice | None:
        try:
            return msgspec.json.decode(self.directory.read(name, ABOUT), type=StoredVoice)
        except (OSError, msgspec.MsgspecError):  # deleted since the listing, or not a voice
            return None


def check_name(name: object) -> str:
    """The name under which a voice is stored: names do not differ by case.

    Raises:
        InvalidRequest: it is none; the message has a similar one that is.
    """
    made = str(name).lower()
    if isinstance(name, str) and NAME.fullmatch(made):
        return made
    near = re.sub(r"[^a-z0-9_-]+", "-", made).strip("-_")[:64].rstrip("-_") or "my-voice"
    raise InvalidRequest(
        f"name = {str(name)[:80]!r}: must be 1 to 64 letters, digits, - and _, a letter or digit first: "
        f"for example {near!r}",
        param="name",
    )
