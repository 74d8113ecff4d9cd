"""``Pipeline``: a model family's graph, and the properties of its stages that a deployment does not choose."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import import_module
from typing import Any, TypeAlias

from transformers import PreTrainedConfig
from vllm.sampling_params import SamplingParams

from vllm_omni.config import EdgeConfig, added_pipelines
from vllm_omni.config.diffusion_params import DiffusionParams
from vllm_omni.errors import ConfigError, InvalidRequest
from vllm_omni.flow import Activation, Chunk, Graph, Yield
from vllm_omni.messages.outputs import OmniRequestOutput
from vllm_omni.messages.payload import Payload
from vllm_omni.messages.timeline import StageTimes, Task, TaskNotes
from vllm_omni.model_executor.frames import Framing
from vllm_omni.names import suggest

PIPELINES = {
    "diffusers": "vllm_omni.model_executor.models.diffusers.pipeline:DiffusersPipeline",
    "language": "vllm_omni.model_executor.models.language.pipeline:LanguagePipeline",
    "qwen2_5_omni": "vllm_omni.model_executor.models.qwen2_5_omni.pipeline:Qwen2_5OmniPipeline",
}

Outputs: TypeAlias = AsyncIterator[OmniRequestOutput]
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
    engine_args: Mapping[str, Any] = field(default_factory=dict)  # what the model needs; a deployment cannot unset it
    sampling_params: Mapping[str, Any] = field(default_factory=dict)  # likewise, e.g. the codec's end tokens
    check_prompt: Callable[[Any], None] | None = None  # first stage: raises InvalidRequest for a rendered prompt
    weight_prefix: str = ""  # of the checkpoint's tensors that the stage loads, for the memory plan
    weight_dtype: str = ""  # of the loaded weights, whatever the stage's dtype; "": that dtype
    combine: Mapping[str, Combine] = field(default_factory=dict)
    """Interface -> an async generator that makes the stage's requests of the fields of a join, ``activation.inputs``:
    chunks whose payloads are ``StageRequest``. Without one an interface reads one field, whose chunks are requests."""
    frames: Mapping[str, Callable[[], Framing]] = field(default_factory=dict)
    """Streamed field -> how it is cut, for readers that run once for each frame (``frames.py``)."""
    route: Mapping[str, Route] = field(default_factory=dict)
    """Interface -> an async generator that sends each output to the fields that it belongs to (``routes.py``). A field
    that gets none is not reached. Without one each field that the call needs gets every output."""

    def check_fixed_params(self, given: Mapping[str, Any]) -> None:
        """Check sampling parameters that were given for the stage, by name.

        Raises:
            InvalidRequest: the model needs another value of one of them.
        """
        for name, value in self.sampling_params.items():
            if name != "stop_token_ids" and given.get(name, value) != value:  # those are added to the given ones
                said = f"{name} = {given[name]!r}: the model of this stage needs {name} = {value!r}; leave it out"
                raise InvalidRequest(f"sampling parameters of stage {self.name!r}: {said}", param=name)

    @property
    def has_own_vocabulary(self) -> bool:
        """Whether its tokens are not those of the checkpoint's tokenizer, but for instance codes of a codec."""
        return bool(self.engine_args.get("skip_tokenizer_init"))


@dataclass(frozen=True)
class FunctionSpec:
    """A node of the graph without an engine: it parses, routes, calls a tool or combines."""

    name: str  # the role's name in the graph
    forward: Callable[[Activation], AsyncIterator[Yield]]
    """An async generator of emissions, see ``flow.Node``. It runs on the front end's event loop, so it must not compute
    for long. ``activation.context`` is the ``RequestContext``."""


@dataclass(frozen=True)
class SpeechPrompt:
    """A prompt, and the text that the model replies instead of generating one.

    The user's parts are plain text: control tokens in them are tokenized as text.
    """

    before: str  # the family's markup, control tokens included
    request: str  # plain text
    after: str  # markup, up to the reply
    reply: str  # plain text, spoken as it is


@dataclass
class StageRequest:
    """A stage's request, made by a transfer function."""

    prompt: Any  # a vLLM prompt; rendered (``vllm.inputs.tokens_input``) behind the first stage
    args: dict[str, Any] = field(default_factory=dict)  # stage arguments (stage_model.STAGE_ARGS), msgpack types


@dataclass
class RequestContext:
    """The data of one request that all stages share."""

    request_id: str
    params: Mapping[str, SamplingParams | DiffusionParams]  # by stage; the latter for a diffusion stage
    options: Mapping[str, Any]  # validated by the pipeline: speaker, num_reply_tokens, ...
    lora_request: Any = None
    priority: int = 0
    trace_headers: Mapping[str, str] | None = None
    engine_kwargs: Mapping[str, Any] = field(default_factory=dict)  # more for ``AsyncLLM.generate`` of the first stage
    stage_durations: dict[str, float] = field(default_factory=dict)  # seconds, filled in as the stages end
    payloads: list[Payload] = field(default_factory=list)  # published by the stages, released at the end
    arrived_at: float = field(default_factory=time.time)
    stage_times: dict[str, StageTimes] = field(default_factory=dict)  # of autoregressive stages, task by task

    def add_duration(self, stage: str, seconds: float) -> None:
        """Record an activation of a stage that has ended; those of a loop add up."""
        self.stage_durations[stage] = self.stage_durations.get(stage, 0.0) + seconds

    def note_task(self, stage: str, task: Task, sent_at: float, ended_at: float, notes: TaskNotes) -> None:
        """Record a task of a stage that has ended, successfully or not. Times are those of ``time.time``."""
        times = self.stage_times.setdefault(stage, StageTimes(sent_at, ended_at))
        times.add(task, sent_at, ended_at, notes)


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
    # Edges whose field is cut into chunks: (source, target) -> sizes, a dataclass with the fields CHUNK_KEYS.
    chunks: Mapping[tuple[str, str], Any] = {}
    speakers: Sequence[str] = ()  # the voices; the first is the default
    voices: Mapping[str, str] = {}  # the deployment's further names of them
    # Requests that name a session (``session_id``) run one after the other and share the graph's ``GlobalParameters``,
    # until it has been idle for so long. None: sessions order nothing and share nothing.
    session_ttl_s: float | None = None
    speech_stage: str | None = None  # generates the speech tokens; None: no text to speech
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
            options: those that ``validate`` has returned, which has rejected what the client got wrong.
        """
        return {"prompt": StageRequest(prompt)}

    def check_options(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """``validate``, where a voice may have a name of the deployment's."""
        speaker = options.get("speaker")
        if isinstance(speaker, str) and speaker in self.voices:
            options = {**options, "speaker": self.voices[speaker]}
        return self.validate(options)

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
            try:
                self.chunks = {**self.chunks, key: replace(self.chunks[key], **edge.chunks)}
            except ConfigError as exc:
                raise ConfigError(f"edge {edge.source}->{edge.target}: chunks: {exc}") from None

    def speech_prompt(self, text: str, instructions: str | None = None) -> SpeechPrompt:
        """Make a prompt to which the first stage replies with ``text``, for models with a ``speech_stage``.

        The request's option ``num_reply_tokens`` then counts the tokens of the reply, at the end of the prompt.

        Args:
            instructions: how to speak it.
        """
        raise NotImplementedError

    def extra_output(self, name: str, output: OmniRequestOutput) -> Any:
        """Get the value of one of ``extra_outputs`` from a stage's output; lists of several outputs are joined."""
        raise KeyError(name)


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
