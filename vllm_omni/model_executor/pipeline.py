"""``Pipeline``: a model family's graph, and the properties of its stages that a deployment does not choose."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from importlib import import_module
from typing import Any, TypeAlias

from transformers import PreTrainedConfig
from vllm.config import VllmConfig
from vllm.sampling_params import SamplingParams

from vllm_omni.config import EdgeConfig, added_pipelines
from vllm_omni.errors import ConfigError, InvalidRequest, OmniError
from vllm_omni.flow import Activation, Chunk, Graph, Yield
from vllm_omni.messages.request import RequestContext as RequestContext
from vllm_omni.messages.request import StageRequest as StageRequest
from vllm_omni.messages.stage_output import StageOutput as StageOutput
from vllm_omni.model_executor.frames import Framing
from vllm_omni.names import suggest

logger = logging.getLogger(__name__)

PIPELINES = {
    "bagel": "vllm_omni.model_executor.models.bagel.pipeline:BagelPipeline",
    "diffusers": "vllm_omni.model_executor.models.diffusers.pipeline:DiffusersPipeline",
    "janus": "vllm_omni.model_executor.models.janus.pipeline:JanusPipeline",
    "glm_image": "vllm_omni.model_executor.models.glm_image.pipeline:GlmImagePipeline",
    "hunyuan_image_3": "vllm_omni.model_executor.models.hunyuan_image_3.pipeline:HunyuanImage3Pipeline",
    "language": "vllm_omni.model_executor.models.language.pipeline:LanguagePipeline",
    "mimo_audio": "vllm_omni.model_executor.models.mimo_audio.pipeline:MiMoAudioPipeline",
    "qwen2_5_omni": "vllm_omni.model_executor.models.qwen2_5_omni.pipeline:Qwen2_5OmniPipeline",
    "qwen3_omni_moe": "vllm_omni.model_executor.models.qwen3_omni_moe.pipeline:Qwen3OmniPipeline",
    "qwen3_omni_moe_thinker": "vllm_omni.model_executor.models.qwen3_omni_moe_thinker.pipeline:ThinkerPipeline",
    "qwen3_tts": "vllm_omni.model_executor.models.qwen3_tts.pipeline:Qwen3TTSPipeline",
}

ENCODES_VOICE = "encodes_voice"
"""Option of a request for the features of a recording (``Pipeline.voice_output``), whose prompt has its ``samples``
(bytes, float32 at 24 kHz) and whether codes are wanted (``with_codes``)."""

Outputs: TypeAlias = AsyncIterator[StageOutput]
Combine: TypeAlias = Callable[[Activation], AsyncIterator[Chunk]]
Route: TypeAlias = Callable[[Outputs, Activation], AsyncIterator[Yield]]


@dataclass(frozen=True)
class StageSpec:
    """The family's part of one stage's settings; the deployment's part is ``StageConfig``."""

    name: str  # the node's name in the graph
    architecture: str  # class registered with vLLM (plugin.py); "": the checkpoint's own
    output_type: str  # "text", "latents", "audio", "image" or "video": which handler opens the stage's payloads
    hf_overrides: Callable[[PreTrainedConfig], PreTrainedConfig] | None = None  # picklable: goes to the process
    publishing_fields: frozenset[str] = frozenset()  # graph fields that need the runner to publish its rows
    publishes_frames: bool = False  # its model is a talker (``PredictsFrames``), which publishes frames and not rows
    publishes_pictures: bool = False  # likewise, its model denoises (``Denoises``), and publishes latents
    # Graph fields whose readers get frames of codes with the tokens, in the front end: they read one answer. The frames
    # are also state of the engine, so that a request stays on it.
    frame_fields: frozenset[str] = frozenset()
    # Graph fields that carry the KV cache of the stage's prompt to a stage that continues behind it (``pass_cache``).
    cache_fields: frozenset[str] = frozenset()
    engine_args: Mapping[str, Any] = field(default_factory=dict)  # what the model needs; a deployment cannot unset it
    sampling_params: Mapping[str, Any] = field(default_factory=dict)  # likewise, e.g. the codec's end tokens
    check_prompt: Callable[[Any], None] | None = None  # first stage: raises InvalidRequest for a rendered prompt
    check_params: Callable[[SamplingParams], None] | None = (
        None  # raises InvalidRequest for what the model cannot honour
    )
    make_args: Callable[[StageRequest, RequestContext, frozenset[str], VllmConfig], dict[str, Any]] | None = None
    """Makes further stage arguments of a request, from its rendered prompt, the parameters and modalities of the
    context, the fields wanted of the stage, and the engine's configuration. Raises ``InvalidRequest`` for what the
    model cannot honour."""
    model_folder: str = ""  # of the checkpoint, if the stage's model stands in one: its config.json and weights
    weight_prefix: str = ""  # of the checkpoint's tensors that the stage loads, for the memory plan
    weight_folder: str = ""  # where these stand in the checkpoint
    weight_dtype: str = ""  # of the loaded weights, whatever the stage's dtype; "": that dtype
    combine: Mapping[str, Combine] = field(default_factory=dict)
    """Interface -> an async generator that makes the stage's requests of the fields of a join, ``activation.inputs``:
    chunks whose payloads are ``StageRequest``. Without one an interface reads one field, whose chunks are requests."""
    frames: Mapping[str, Callable[[], Framing]] = field(default_factory=dict)
    """Streamed field -> how it is cut, for readers that run once for each frame (``frames.py``)."""
    route: Mapping[str, Route] = field(default_factory=dict)
    """Interface -> an async generator that sends each output to the fields that it belongs to (``routes.py``). A field
    that gets none is not reached. Without one each field that the call needs gets every output."""

    def check_sampling_params(self, params: SamplingParams, given: Mapping[str, Any]) -> None:
        """Check sampling parameters that were given for the stage.

        Args:
            given: those fields of them that are not defaults.

        Raises:
            InvalidRequest: the model needs another value of one of them.
            OmniError: ``check_params`` fails.
        """
        if self.check_params is not None:
            with client_checks(f"stage {self.name!r}: check_params"):
                self.check_params(params)
        for name, value in self.sampling_params.items():
            if name != "stop_token_ids" and given.get(name, value) != value:  # those are added to the given ones
                said = f"{name} = {given[name]!r}: the model of this stage needs {name} = {value!r}; leave it out"
                raise InvalidRequest(f"sampling parameters of stage {self.name!r}: {said}", param=name)

    @property
    def publishes_rows(self) -> bool:
        """Whether other stages read a row of it for each token."""
        return bool(self.publishing_fields) and not self.publishes_pictures and not self.publishes_frames

    @property
    def has_own_vocabulary(self) -> bool:
        """Whether its tokens are not those of the checkpoint's tokenizer, but for instance codes of a codec."""
        return bool(self.engine_args.get("skip_tokenizer_init"))


@dataclass(frozen=True)
class FunctionSpec:
    """A node of the graph without an engine: it parses, routes, calls a tool or combines."""

    name: str  # the role's name in the graph
    forward: Callable[[Activation], AsyncIterator[Yield]]
    """An async generator of emissions, see ``flow.Node``. ``activation.context`` is the ``RequestContext``."""
    processes: int = 0
    """How many processes of its own it runs in, for one that computes for long. 0: on the front end's event loop, which
    it must not hold up. It is then a function of a module, which each process imports by its name; what it reads and
    yields is copied (``engine/wire.py``), and it cannot have ``GlobalParameters``."""


@dataclass(frozen=True)
class SpeechPrompt:
    """A prompt, and the text that the model replies instead of generating one.

    The user's parts are plain text: control tokens in them are tokenized as text.
    """

    before: str  # the family's markup, control tokens included
    request: str  # plain text
    after: str  # markup, up to the reply
    reply: str = ""  # plain text, spoken as it is; "" where the first stage itself speaks, being asked to


class Pipeline(ABC):
    """One model family on one checkpoint."""

    graph: Graph
    # Others over the same stages and functions; a request names one of them as its model.
    further_graphs: Sequence[Graph] = ()
    stages: Sequence[StageSpec]
    functions: Sequence[FunctionSpec] = ()
    modalities: Mapping[str, str]  # modality of a request -> output of the graph
    # Likewise, only by name: intermediate results (codec ids). One of the two names each output of the graphs.
    extra_outputs: Mapping[str, str] = {}
    sample_rate: int = 0  # of the audio output, Hz; 0: each output carries its own
    # Edges whose field is cut into chunks: (source, target) -> sizes, a dataclass with some of the fields CHUNK_KEYS.
    chunks: Mapping[tuple[str, str], Any] = {}
    speakers: Sequence[str] = ()  # the voices; the first is the default
    voices: Mapping[str, str] = {}  # the deployment's further names of them
    # Requests that name a session (``session_id``) run one after the other and share the graph's ``GlobalParameters``,
    # until it has been idle for so long. None: sessions order nothing and share nothing.
    session_ttl_s: float | None = None
    speech_stage: str | None = None  # generates the speech tokens; None: no text to speech
    # Where that is the first stage: whether it also replies to others' speech, and speaks a text if its prompt asks for
    # that (``speech_prompt``, without a reply). False: its prompts are texts to speak.
    converses: bool = False
    hears_voices: bool = False  # whether such a prompt can have the recording of a voice (``voice_prompt``)
    continues_answers: bool = False  # whether a text may follow a picture of an answer (``continue_answer``)
    chat_template: str | None = None  # of chats, unless the deployment gives one; None: the checkpoint's
    # The one of ``extra_outputs`` that has the features of a recording; requests then have the option ``cloned_voice``
    # (``entrypoints/voice_cloning.py``). None: the model clones no voices.
    voice_output: str | None = None
    x_vector_size: int = 0  # of a cloned voice
    # Where the pipeline is given as a class: its stages, with the keys of a deployment file.
    deployment: Mapping[str, Any] = {}

    @abstractmethod
    def __init__(self, model: str, hf_config: PreTrainedConfig, revision: str | None = None) -> None: ...

    @abstractmethod
    def validate(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """Check the options of one request and fill in defaults.

        Raises:
            InvalidRequest: an unknown option or value, with the nearest valid one.
        """

    def inputs(self, prompt: Any, options: Mapping[str, Any]) -> Mapping[str, Any]:
        """Fill the graph's placeholders for a request; override it where there are others than ``prompt``.

        Args:
            options: those that ``validate`` has returned.

        Raises:
            InvalidRequest: the prompt is wrong; what is wrong with the options, ``validate`` has rejected.
        """
        return {"prompt": StageRequest(prompt)}

    async def request_inputs(self, prompt: Any, context: RequestContext) -> Mapping[str, Any]:
        """``inputs``, where they follow from the parameters of stages, too, or take long: override one of the two."""
        return self.inputs(prompt, context.options)

    def check_options(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """``validate``, where a voice may have a name of the deployment's.

        Raises:
            InvalidRequest: ``validate`` rejects an option.
            OmniError: it fails.
        """
        speaker = options.get("speaker")
        if isinstance(speaker, str) and speaker in self.voices:
            options = {**options, "speaker": self.voices[speaker]}
        with client_checks(f"{type(self).__name__}.validate"):
            return self.validate(options)

    @property
    def speaks_prompts(self) -> bool:
        """Whether a prompt is itself the text to speak: the first stage generates the speech."""
        return self.speaks_first and not self.converses

    @property
    def speaks_first(self) -> bool:
        """Whether the first stage generates the speech."""
        return self.speech_stage == self.stages[0].name

    def set_voices(self, voices: Mapping[str, str]) -> None:
        """Set the deployment's further names of voices.

        Raises:
            ConfigError: a name stands for a voice that the checkpoint does not have.
        """
        for name, speaker in voices.items():
            if speaker not in self.speakers:
                raise ConfigError(f"voices.{name} = {speaker!r}: {suggest(str(speaker), self.speakers)}")
        self.voices = dict(voices)

    def set_chunks(self, edges: Iterable[EdgeConfig]) -> None:
        """Set the deployment's chunk sizes.

        Raises:
            ConfigError: the edge's field is not cut into chunks, or a size is invalid.
        """
        for edge in edges:
            if not edge.chunks:
                continue
            key = (edge.source, edge.target)
            if key not in self.chunks:
                raise ConfigError(
                    f"edge {edge.source}->{edge.target}: chunks: the field of this edge is not cut into chunks"
                )
            known = [one.name for one in fields(self.chunks[key])]
            for name in edge.chunks:
                if name not in known:
                    raise ConfigError(f"edge {edge.source}->{edge.target}: chunks: {name}: {suggest(name, known)}")
            try:
                self.chunks = {**self.chunks, key: replace(self.chunks[key], **edge.chunks)}
            except ConfigError as exc:
                raise ConfigError(f"edge {edge.source}->{edge.target}: chunks: {exc}") from None

    def speech_prompt(self, text: str, instructions: str | None = None) -> SpeechPrompt:
        """Make a prompt to which the first stage replies with ``text``, for models with a later ``speech_stage``.

        The request's option ``num_reply_tokens`` then counts the tokens of the reply, at the end of the prompt. For a
        model that converses, make a prompt that asks for the text, without a reply.

        Args:
            instructions: how to speak it.
        """
        raise NotImplementedError

    def voice_prompt(self, text: str, instructions: str | None = None) -> SpeechPrompt:
        """Make a prompt that asks for a text in the voice of a recording, for models that hear voices.

        Its ``before`` has the model's placeholder of the recording.
        """
        raise NotImplementedError

    def chat_template_kwargs(self, modalities: Collection[str]) -> Mapping[str, Any]:
        """Variables of the chat template that follow from what the user gets; those of a request win."""
        return {}

    def picture_prompt(self, text: str, images: Sequence[Any]) -> Any:
        """Make a prompt of the first stage that asks for a picture, of a text and PIL images; for models that draw."""
        raise NotImplementedError

    def continue_answer(self, ids: Sequence[int], image: Any) -> tuple[list[int], Any]:
        """Continue an answer behind a picture of it; for models with ``continues_answers``.

        Args:
            ids: tokens that the first stage has generated for the text and the picture.
            image: the picture, PIL.

        Returns:
            Those of the ids that are the text, and a prompt behind them: the picture, and what starts the next text.
        """
        raise NotImplementedError

    def mm_processor_kwargs(self, modalities: Collection[str]) -> Mapping[str, Any]:
        """Likewise, arguments of vLLM's processor of media."""
        return {}

    def extra_output(self, name: str, output: StageOutput) -> Any:
        """Get the value of one of ``extra_outputs`` from a stage's output; lists of several outputs are joined."""
        raise KeyError(name)


@contextmanager
def client_checks(where: str) -> Iterator[None]:
    """Run a function of the pipeline that judges what a client sent, and rejects it by ``InvalidRequest`` alone.

    Args:
        where: names the function.

    Raises:
        OmniError: it raised something else, whatever its class: that is its own mistake, and not the client's.
    """
    try:
        yield
    except InvalidRequest:
        raise
    except Exception as exc:
        logger.exception("%s failed", where)
        raise OmniError(f"the pipeline failed: {where}: {exc!r}") from exc


def find_pipeline_cls(model_type: str) -> type[Pipeline]:
    """The pipeline of a model family, from this package or another (``config.added_pipelines``).

    Raises:
        ConfigError: no pipeline for this model type.
    """
    if (added := added_pipelines().get(model_type)) is not None:
        pipeline_cls: type[Pipeline] = added.load()
    elif model_type in PIPELINES:
        module, _, name = PIPELINES[model_type].partition(":")
        pipeline_cls = getattr(import_module(module), name)
    else:
        known = sorted(PIPELINES.keys() | added_pipelines().keys())
        raise ConfigError(f"no pipeline for model type {model_type!r}; known: {', '.join(known)}")
    return pipeline_cls
