"""Check the attributes and functions of a pipeline before its graphs are compiled."""

from __future__ import annotations

import inspect
import math
import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

from vllm_omni.config.checks import Problem
from vllm_omni.config.model import CHUNK_KEYS
from vllm_omni.config.vllm_args import check_engine_args, make_sampling_params
from vllm_omni.engine.function_messages import name_of
from vllm_omni.engine.output_processor import HANDLERS
from vllm_omni.errors import GraphError
from vllm_omni.flow import Graph
from vllm_omni.flow.graph.parser import with_called
from vllm_omni.model_executor.pipeline import FunctionSpec, Pipeline, StageSpec
from vllm_omni.names import suggest


def check_pipeline(pipeline: Pipeline) -> None:
    """Check the types of a pipeline's attributes, and the signatures of the functions that requests call.

    Raises:
        GraphError: an attribute or a function is wrong; the message names it.
    """
    where = type(pipeline).__name__
    for name, (is_right, needed) in _ATTRIBUTES.items():
        _check(f"{where}.{name}", getattr(pipeline, name, None), is_right, needed)
    for graph in with_called((pipeline.graph, *pipeline.further_graphs)):
        _check_graph(where, graph)
    for spec in pipeline.stages:
        _check_stage(f"{where}: stage {spec.name!r}", spec)
    for function in pipeline.functions:
        _check_function_spec(f"{where}: function {function.name!r}", function)
    check_function(f"{where}.validate", pipeline.validate, "options")
    check_function(f"{where}.inputs", pipeline.inputs, "prompt", "options")
    check_function(f"{where}.chat_template_kwargs", pipeline.chat_template_kwargs, "modalities")
    check_function(f"{where}.mm_processor_kwargs", pipeline.mm_processor_kwargs, "modalities")
    if pipeline.extra_outputs:
        _check_overridden(pipeline, "extra_output", "extra_outputs", "name", "output")
    if pipeline.continues_answers:
        _check_overridden(pipeline, "continue_answer", "continues_answers", "ids", "image")
    if pipeline.speech_stage is not None:
        _check_speech(where, pipeline)


def _check_graph(where: str, graph: Graph) -> None:
    for name in (graph.name, *graph.declarations.graph_calls):
        _check(f"{where}: name of graph", name, _is_model_name, "a name without spaces: requests name it")
    for one in graph.declarations.parameters.values():
        check_function(f"graph {graph.name!r}: GlobalParameters {one.name!r}: make", one.make)
        if one.release is not None:
            check_function(f"graph {graph.name!r}: GlobalParameters {one.name!r}: release", one.release, "value")


def _check_speech(where: str, pipeline: Pipeline) -> None:
    if not pipeline.speaks_prompts:
        _check_overridden(pipeline, "speech_prompt", "speech_stage", "text", "instructions")
    if pipeline.hears_voices:
        _check_overridden(pipeline, "voice_prompt", "hears_voices", "text", "instructions")
    if "audio" not in pipeline.modalities:
        raise GraphError(f"{where}.speech_stage: speech is the modality 'audio', which modalities does not name")


def check_generator(where: str, function: Any, *args: str) -> None:
    """Check that a function is an async generator function of these arguments.

    Raises:
        GraphError: it is not.
    """
    if not callable(function) or not any(map(inspect.isasyncgenfunction, (function, type(function).__call__))):
        raise GraphError(f"{where}: {_name(function)}: must be an async generator function (async def with yield)")
    _check_arguments(where, function, args)


def check_function(where: str, function: Any, *args: str) -> None:
    """Check that a function of these arguments returns its value at once.

    Raises:
        GraphError: it does not.
    """
    waits = inspect.iscoroutinefunction, inspect.isasyncgenfunction, inspect.isgeneratorfunction
    if not callable(function) or any(is_kind(function) for is_kind in waits):
        raise GraphError(f"{where}: {_name(function)}: must be a plain function (def, without yield)")
    _check_arguments(where, function, args)


def _check_arguments(where: str, function: Callable[..., Any], args: Sequence[str]) -> None:
    try:
        signature = inspect.signature(function)
    except ValueError:  # some classes that are written in C have none
        return
    try:
        signature.bind(*args)
    except TypeError as exc:
        raise GraphError(f"{where}: {_name(function)}{signature}: is called with ({', '.join(args)}): {exc}") from None


def _check_overridden(pipeline: Pipeline, method: str, attribute: str, *args: str) -> None:
    where = f"{type(pipeline).__name__}.{method}"
    if getattr(type(pipeline), method) is getattr(Pipeline, method):
        raise GraphError(f"{where}: override it, which {attribute} needs")
    check_function(where, getattr(pipeline, method), *args)


def _check_stage(where: str, spec: StageSpec) -> None:
    for name, (is_right, needed) in _SPEC_FIELDS.items():
        _check(f"{where}: {name}", getattr(spec, name), is_right, needed)
    if spec.output_type not in HANDLERS:
        raise GraphError(f"{where}: output_type {spec.output_type!r}; {suggest(spec.output_type, HANDLERS)}")
    for interface, combine in spec.combine.items():
        check_generator(f"{where}: combine of {interface!r}", combine, "activation")
    for interface, route in spec.route.items():
        check_generator(f"{where}: route of {interface!r}", route, "outputs", "activation")
    for field, make in spec.frames.items():
        _check_framing(f"{where}: frames of {field!r}", make)
    if spec.check_prompt is not None:
        check_function(f"{where}: check_prompt", spec.check_prompt, "prompt")
    if spec.check_params is not None:
        check_function(f"{where}: check_params", spec.check_params, "params")
    if spec.hf_overrides is not None:
        check_function(f"{where}: hf_overrides", spec.hf_overrides, "hf_config")
        _check_picklable(f"{where}: hf_overrides", spec.hf_overrides)
    for key, check in {"engine_args": check_engine_args, "sampling_params": make_sampling_params}.items():
        try:
            check(dict(getattr(spec, key)))
        except Problem as exc:
            raise GraphError(f"{where}: {exc.below(key, getattr(spec, key))}") from None


def _check_function_spec(where: str, spec: FunctionSpec) -> None:
    check_generator(where, spec.forward, "activation")
    needed = "a number of processes, or 0 for none of its own"
    _check(f"{where}: processes", spec.processes, lambda value: type(value) is int and value >= 0, needed)
    if spec.processes:
        try:
            name_of(spec.forward)
        except TypeError as exc:
            raise GraphError(
                f"{where}: {_name(spec.forward)}: cannot run in a process of its own: {exc}; use a function of a "
                "module, or processes = 0"
            ) from exc


def _check_framing(where: str, make: Any) -> None:
    check_function(where, make)
    try:
        framing = make()
    except Exception as exc:
        raise GraphError(f"{where}: {_name(make)}() failed: {exc!r}") from exc
    if not all(callable(getattr(framing, method, None)) for method in ("push", "finish")):
        raise GraphError(f"{where}: {_name(make)}() made {framing!r}: must have push and finish, see frames.py")


def _check_picklable(where: str, function: Any) -> None:
    try:
        pickle.dumps(function)
    except Exception as exc:
        raise GraphError(
            f"{where}: {_name(function)}: cannot be sent to the engine's process ({exc}): use a function of a module"
        ) from exc


def _check(where: str, value: Any, is_right: Callable[[Any], bool], needed: str) -> None:
    if not is_right(value):
        raise GraphError(f"{where} = {value!r}: must be {needed}")


def _name(function: Any) -> str:
    return getattr(function, "__qualname__", repr(function))


def _is_model_name(value: Any) -> bool:
    return isinstance(value, str) and bool(value) and not any(map(str.isspace, value))


def _is_name(value: Any) -> bool:
    return isinstance(value, str) and bool(value)


def _is_sequence(kind: type, value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str) and all(isinstance(one, kind) for one in value)


def _is_text_mapping(value: Any) -> bool:
    return isinstance(value, Mapping) and all(_is_name(one) for pair in value.items() for one in pair)


def _is_named_mapping(value: Any) -> bool:
    return isinstance(value, Mapping) and all(map(_is_name, value))


def _is_rate(value: Any) -> bool:
    return type(value) is int and value >= 0


def _is_ttl(value: Any) -> bool:
    return value is None or (type(value) in (int, float) and 0 < value < math.inf)


def _is_chunks(value: Any) -> bool:
    return isinstance(value, Mapping) and all(
        isinstance(edge, tuple) and len(edge) == 2 and _has_sizes(sizes) for edge, sizes in value.items()
    )


def _has_sizes(sizes: Any) -> bool:
    is_made = is_dataclass(sizes) and not isinstance(sizes, type)
    return is_made and {one.name for one in fields(sizes)} <= {*CHUNK_KEYS}


_Attributes = Mapping[str, tuple[Callable[[Any], bool], str]]
_OUTPUTS = "a mapping from names to outputs of the graph"

_ATTRIBUTES: _Attributes = {
    "graph": (lambda value: isinstance(value, Graph), "a Graph"),
    "further_graphs": (lambda value: _is_sequence(Graph, value), "a sequence of Graph"),
    "stages": (lambda value: bool(value) and _is_sequence(StageSpec, value), "a sequence of StageSpec, at least one"),
    "functions": (lambda value: _is_sequence(FunctionSpec, value), "a sequence of FunctionSpec"),
    "modalities": (lambda value: bool(value) and _is_text_mapping(value), f"{_OUTPUTS}, with at least one"),
    "extra_outputs": (_is_text_mapping, _OUTPUTS),
    "sample_rate": (_is_rate, "a number of samples per second, or 0 where each output carries its own"),
    "chunks": (_is_chunks, f"a mapping from (source, target) to a dataclass with some of {', '.join(CHUNK_KEYS)}"),
    "speakers": (lambda value: _is_sequence(str, value), "a sequence of names"),
    "session_ttl_s": (_is_ttl, "a number of seconds above 0, or None for no sessions"),
    "speech_stage": (lambda value: value is None or _is_name(value), "the name of a stage, or None"),
    **dict.fromkeys(
        ("converses", "hears_voices", "continues_answers"), (lambda value: isinstance(value, bool), "True or False")
    ),
    "chat_template": (lambda value: value is None or _is_name(value), "a template, or None"),
}
_SPEC_FIELDS: _Attributes = {
    "name": (_is_name, "the name of a role"),
    "architecture": (lambda value: isinstance(value, str), "the name of a class that is registered with vLLM, or ''"),
    "output_type": (_is_name, f"one of {', '.join(HANDLERS)}"),
    **dict.fromkeys(
        ("publishing_fields", "frame_fields", "cache_fields"),
        (
            lambda value: isinstance(value, frozenset) and all(map(_is_name, value)),
            "a frozenset of names of fields",
        ),
    ),
    **dict.fromkeys(("combine", "route"), (_is_named_mapping, "a mapping from interfaces to functions")),
    "frames": (_is_named_mapping, "a mapping from fields to what makes a Framing"),
    **dict.fromkeys(("engine_args", "sampling_params"), (_is_named_mapping, "a mapping from names to values")),
}
