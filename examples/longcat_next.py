"""LongCat-Next's graph: a language model writes text, discrete pictures and discrete sound; two stages decode those.

vllm serve MODEL --omni --pipeline examples/longcat_next.py:LongCatNext \
    --stage image_decoder.model=JANUS --stage audio_decoder.model=MIMO_AUDIO

MODEL is a LongCat-Flash whose vocabulary continues with ids of sound and pictures, and whose configuration says where
they begin (`audio_offset`, `visual_offset`). The decoders are those of Janus-Pro and of MiMo-Audio. LongCat-Next's own
checkpoint is not served: it has heads, n-gram embeddings and decoders that no library here has (docs/models.md).
"""

from collections.abc import AsyncIterator, Mapping
from functools import partial
from typing import Any

from transformers import PreTrainedConfig
from vllm.inputs import tokens_input

from vllm_omni.errors import ConfigError, InvalidRequest
from vllm_omni.flow import CallInfo, Chunk, Field, Graph, Role, interface
from vllm_omni.model_executor.models.janus import image_decoder
from vllm_omni.model_executor.models.mimo_audio import decoder as audio_decoder
from vllm_omni.model_executor.pipeline import Pipeline, StageOutput, StageRequest, StageSpec


class Backbone(Role):
    generate = interface([["prompt"]], {"text": Field("text", streamed=True), "codes": Field("codes")})


class ImageDecoder(Role):
    decode = interface([["codes"]], {"image": Field("image", streamed=True)})


class AudioDecoder(Role):
    decode = interface([["codes"]], {"audio": Field("audio")})


class LongCatNext(Pipeline):
    modalities = {"text": "text", "image": "image", "audio": "audio"}
    sample_rate = 24000  # of MiMo-Audio's decoder
    num_picture_codes = 576  # of Janus-Pro's decoder
    num_channels = 2  # codes of one frame of sound, which follow one another in the reply
    deployment = {
        "stages": {
            "backbone": {"engine_type": "ar"},
            "image_decoder": {"engine_type": "generation"},
            "audio_decoder": {"engine_type": "generation"},
        }
    }

    def __init__(self, model: str, hf_config: PreTrainedConfig, revision: str | None = None) -> None:
        self.audio_ids, self.image_ids = ranges_of(model, hf_config)
        self.graph = Graph("longcat_next")
        reply = self.graph.role(Backbone, "backbone").generate(prompt=self.graph.placeholder("prompt"))
        pictures = self.graph.role(ImageDecoder, "image_decoder").decode(codes=reply.codes.via(self.to_pictures))
        sound = self.graph.role(AudioDecoder, "audio_decoder").decode(codes=reply.codes.via(self.to_sound))
        # A branch that a request does not ask for is not reached.
        self.graph.output(text=reply.text, image=pictures.image, audio=sound.audio)
        self.stages = (
            StageSpec("backbone", architecture="", output_type="text", engine_args={"runner": "generate"}),
            StageSpec(
                "image_decoder",
                architecture=image_decoder.ARCHITECTURE,
                output_type="image",
                hf_overrides=image_decoder.decoder_hf_config,
                weight_prefix=image_decoder.PREFIX,
                weight_dtype="float32",
            ),
            StageSpec(
                "audio_decoder",
                architecture=audio_decoder.ARCHITECTURE,
                output_type="audio",
                hf_overrides=partial(audio_decoder.decoder_hf_config, num_channels=self.num_channels),
                weight_prefix="decoder.",
                weight_folder="audio_tokenizer",
                weight_dtype="float32",
            ),
        )

    def validate(self, options: Mapping[str, Any]) -> dict[str, Any]:
        for name in options:
            raise InvalidRequest(f"unknown option {name!r}: this pipeline has none")
        return {}

    async def to_pictures(self, chunks: AsyncIterator[Chunk], call: CallInfo) -> AsyncIterator[Chunk]:
        """One request for each picture; the codes of one that the reply has not completed are left out."""
        codes, size = await codes_of(chunks, self.image_ids), self.num_picture_codes
        pictures = [codes[end - size : end] for end in range(size, len(codes) + 1, size)]
        for number, picture in enumerate(pictures):
            request = StageRequest(tokens_input([0]), {"codes": picture, "output_type": "media"})
            yield Chunk(request, number, last=number == len(pictures) - 1)

    async def to_sound(self, chunks: AsyncIterator[Chunk], call: CallInfo) -> AsyncIterator[Chunk]:
        """One request for the whole sound, up to the last complete frame."""
        codes = await codes_of(chunks, self.audio_ids)
        if complete := codes[: len(codes) // self.num_channels * self.num_channels]:
            yield Chunk(StageRequest(tokens_input([0]), {"codes": complete}), last=True)


def ranges_of(model: str, hf_config: PreTrainedConfig) -> tuple[range, range]:
    """The ids of sound and of pictures: behind those of texts, in this order.

    Raises:
        ConfigError: the configuration does not say where they begin.
    """
    offsets = [getattr(hf_config, name, None) for name in ("audio_offset", "visual_offset")]
    audio, image = offsets
    if not (isinstance(audio, int) and isinstance(image, int) and 0 < audio <= image <= hf_config.vocab_size):
        raise ConfigError(
            f"{model}: audio_offset = {audio!r}, visual_offset = {image!r}: must be the first ids of sound and of "
            f"pictures, behind those of texts and below vocab_size = {hf_config.vocab_size}"
        )
    return range(audio, image), range(image, hf_config.vocab_size)


async def codes_of(chunks: AsyncIterator[Chunk], ids: range) -> list[int]:
    """The codes of one kind among the tokens of a reply."""
    replies: list[StageOutput] = [chunk.payload async for chunk in chunks if chunk.payload is not None]
    return [token - ids.start for one in replies for token in one.outputs[0].token_ids if token in ids]
