"""``VoiceCloner``: the voice of a request, from a recording, from an uploaded voice or from an embedding."""

from __future__ import annotations

import asyncio
import hashlib
import math
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from vllm.config import ModelConfig

from vllm_omni import envs
from vllm_omni.engine.media_budget import MediaBudget
from vllm_omni.engine.media_connector import BudgetedConnector
from vllm_omni.engine.rejection import rejection
from vllm_omni.errors import InvalidRequest
from vllm_omni.names import suggest
from vllm_omni.speech.recording import SAMPLE_RATE, Samples, make_recording
from vllm_omni.speech.voices import StoredVoice, VoiceStore

MAX_CACHED = 256  # recordings; their features are a few kilobytes each

Recording: TypeAlias = str | bytes | tuple[np.ndarray[Any, Any], float]
"""A URL (http, https, data) or base64; the bytes of a file; or samples, [n], and their rate in Hz."""


class VoiceFeatures(NamedTuple):
    """What the encoders make of a recording, as it travels in requests."""

    x_vector: bytes  # float32
    codes: bytes = b""  # int16, [num_frames, groups]
    num_frames: int = 0


class ClonedVoice(NamedTuple):
    """The option of a request that a pipeline reads (``cloned_voice``)."""

    features: VoiceFeatures
    transcript: str = ""  # of the recording; "": the timbre alone


Encode: TypeAlias = Callable[[Samples, bool], Awaitable[VoiceFeatures]]
"""Encodes a recording; with its codes, if the second argument says so."""


class RecordingReader:
    """Reads recordings that requests give, by the rules for media of chats: hosts, files, deadline and memory."""

    def __init__(self, config: ModelConfig, budget: MediaBudget) -> None:
        self._budget = budget
        self._connector = BudgetedConnector(
            allowed_local_media_path=config.allowed_local_media_path,
            allowed_media_domains=config.allowed_media_domains,
        )

    async def read(self, given: Recording, field: str) -> Samples:
        """Samples in the encoders' form.

        Raises:
            InvalidRequest: it cannot be fetched or decoded, or is too short or too long; the message names the field.
            Overloaded: too many prompts with media are being read.
        """
        with self._budget.hold():
            try:
                samples, rate = await self._decoded(given)
            except Exception as exc:
                raise InvalidRequest(f"{field}: the recording cannot be read: {rejection(exc)}", param=field) from exc
            return await asyncio.to_thread(make_recording, samples, rate, envs.VLLM_OMNI_MAX_VOICE_SECONDS, field)

    async def _decoded(self, given: Recording) -> tuple[np.ndarray[Any, Any], float]:
        match given:
            case (np.ndarray() as samples, int() | float() as rate) if samples.ndim == 1 and rate > 0:
                return samples, rate
            case bytes():
                return await self._connector.decode_audio(given)
            case str():
                url = given if ":" in given[:8] else f"data:audio/*;base64,{given}"
                return await self._connector.fetch_audio_async(url)
        raise ValueError("must be a URL, base64, the bytes of a file, or a pair of samples [n] and their rate")


class VoiceCloner:
    """Makes cloned voices of what requests give. Features of recordings are kept by content.

    Args:
        size: of an x-vector.
        store: of uploaded voices.
    """

    def __init__(self, reader: RecordingReader, encode: Encode, size: int, store: VoiceStore) -> None:
        self.reader = reader
        self.store = store
        self._encode = encode
        self._size = size
        self._features: OrderedDict[str, VoiceFeatures] = OrderedDict()

    async def clone(
        self,
        name: str | None = None,
        *,
        ref_audio: Recording | None = None,
        ref_text: str | None = None,
        speaker_embedding: Sequence[float] | None = None,
    ) -> ClonedVoice | None:
        """The voice of a request; None: it names none, or one that was not uploaded.

        Raises:
            InvalidRequest: the fields contradict each other, or one of them is wrong.
        """
        given = {"voice": name, "ref_audio": ref_audio, "speaker_embedding": speaker_embedding}
        names = [field for field, value in given.items() if value is not None]
        if len(names) > 1:
            said = f"{names[1]}: cannot be combined with {names[0]}: each is a whole voice; give one of them"
            raise InvalidRequest(said, param=names[1])
        if ref_text and ref_audio is None:
            raise InvalidRequest("ref_text: it is the transcript of ref_audio, which is missing", param="ref_text")
        if speaker_embedding is not None:
            return ClonedVoice(VoiceFeatures(self._x_vector(speaker_embedding)))
        if ref_audio is not None:
            return await self._of_recording(ref_audio, ref_text or "")
        voice = None if name is None else await asyncio.to_thread(self.store.find, name)
        return None if voice is None else await self.of_stored(voice)

    async def check_known(self, name: str, speakers: Sequence[str]) -> None:
        """Check the name of a voice that was not uploaded, where some were.

        Raises:
            InvalidRequest: there is none of this name; the message has the nearest.
        """
        uploaded = [voice.name for voice in await asyncio.to_thread(self.store.voices)]
        if uploaded and name not in speakers:
            known = [*speakers, *uploaded]
            raise InvalidRequest(f"unknown voice {name!r}: {suggest(name.lower(), known)}", param="voice")

    async def of_stored(self, voice: StoredVoice) -> ClonedVoice:
        """An uploaded voice, whose features are encoded once.

        Raises:
            UnknownVoice: it has been deleted meanwhile.
        """

        async def read() -> Samples:
            recording = await asyncio.to_thread(self.store.recording, voice)
            return await self.reader.read(recording, "voice")

        return await self._voice(voice.digest, read, voice.transcript)

    async def encode(self, recording: bytes, samples: Samples, transcript: str) -> None:
        """Encode a recording that is about to be uploaded, so that its requests find the features."""

        async def read() -> Samples:
            return samples

        await self._voice(hashlib.sha256(recording).hexdigest(), read, transcript)

    @staticmethod
    def seconds(samples: Samples) -> float:
        return len(samples) / SAMPLE_RATE

    async def _of_recording(self, given: Recording, transcript: str) -> ClonedVoice:
        if isinstance(given, str) and given[:5].lower() == "data:":
            digest = await asyncio.to_thread(lambda: hashlib.sha256(given.encode()).hexdigest())
            return await self._voice(digest, lambda: self.reader.read(given, "ref_audio"), transcript)
        samples = await self.reader.read(given, "ref_audio")  # what a URL leads to may change
        digest = await asyncio.to_thread(lambda: hashlib.sha256(samples.tobytes()).hexdigest())

        async def read() -> Samples:
            return samples

        return await self._voice(digest, read, transcript)

    async def _voice(self, digest: str, read: Callable[[], Awaitable[Samples]], transcript: str) -> ClonedVoice:
        features = self._features.get(digest)
        if features is None or (transcript and not features.codes):
            features = await self._encode(await read(), bool(transcript))
            self._features[digest] = features
        self._features.move_to_end(digest)
        while len(self._features) > MAX_CACHED:
            self._features.popitem(last=False)
        return ClonedVoice(features, transcript) if transcript else ClonedVoice(VoiceFeatures(features.x_vector))

    def _x_vector(self, numbers: Sequence[float]) -> bytes:
        field = "speaker_embedding"
        if len(numbers) != self._size:
            raise InvalidRequest(f"{field} has {len(numbers)} numbers: this model's have {self._size}", param=field)
        if not all(isinstance(one, int | float) and math.isfinite(one) for one in numbers):
            raise InvalidRequest(f"{field}: must be finite numbers", param=field)
        return np.asarray(numbers, np.float32).tobytes()
