"""``extra_arguments``: check a request's ``extra_args`` against the annotations of its pipeline's call."""

from __future__ import annotations

import collections.abc
import functools
import inspect
import re
import types
from collections.abc import Collection, Mapping
from typing import Any, Union, get_args, get_origin, get_type_hints

from pydantic import StrictBool, StrictFloat, StrictInt, StrictStr, TypeAdapter, ValidationError

from vllm_omni.config.checks import translate
from vllm_omni.config.diffusion_params import SERVER_ARGS, DiffusionParams
from vllm_omni.errors import InvalidRequest
from vllm_omni.names import suggest

FIELDS = frozenset([*SERVER_ARGS, *DiffusionParams.__struct_fields__])
"""Arguments that a request has as fields of their own, or not at all."""

DISPENSABLE = re.compile(r"prompt|ip_adapter|attention|callback|^latents$|^last_image$|^input_images$")

_SCALARS = {int: StrictInt, float: StrictFloat, bool: StrictBool, str: StrictStr, Any: Any}
_LISTS = (list, collections.abc.Sequence, collections.abc.Iterable)


def extra_arguments(pipeline_class: type, extra_args: Mapping[str, Any], given: Collection[str]) -> dict[str, Any]:
    """Convert ``extra_args`` to what the ``__call__`` of ``pipeline_class`` takes.

    Args:
        given: names of the arguments that the request has otherwise.

    Raises:
        InvalidRequest: an argument is unknown or given twice, is an object that a request cannot carry (tensors,
            images, callbacks), or has a value of another type.
    """
    name = pipeline_class.__name__
    adapters = _adapters(pipeline_class)
    values = {}
    for parameter, value in extra_args.items():
        known = [other for other, adapter in adapters.items() if adapter is not None and other not in {*given, *FIELDS}]
        if parameter not in adapters or parameter in given:
            raise _rejection(f"{name} takes no extra argument {parameter!r}: {suggest(parameter, known)}")
        adapter = adapters[parameter]
        if adapter is None:
            kind = inspect.signature(pipeline_class.__call__).parameters[parameter].annotation
            said = f"{parameter!r} of {name} is {getattr(kind, '__name__', kind)}, which no request can carry"
            raise _rejection(f"{said}; others: {', '.join(known)}")
        try:
            values[parameter] = adapter.validate_python(value)
        except ValidationError as exc:
            raise _rejection(f"{parameter} = {value!r:.80}: {translate(exc, value)}") from None
    return values


def uncarried_arguments(pipeline_class: type) -> list[str]:
    """Arguments that no request can carry, without those that a pipeline never needs beside a text."""
    names = [name for name, adapter in _adapters(pipeline_class).items() if adapter is None]
    return [name for name in names if name not in FIELDS and not DISPENSABLE.search(name)]


def _rejection(message: str) -> InvalidRequest:
    return InvalidRequest(f"extra_args: {message}", param="extra_args")


@functools.cache
def _adapters(pipeline_class: type) -> dict[str, TypeAdapter[Any] | None]:
    """Parameter of the pipeline's call -> validator of its values; None: no request can carry one."""
    call = pipeline_class.__call__
    try:
        hints = get_type_hints(call)
    except TypeError:  # an annotation of diffusers that cannot be evaluated: the pipeline itself has to check
        hints = {}
    adapters: dict[str, TypeAdapter[Any] | None] = {}
    for name, parameter in list(inspect.signature(call).parameters.items())[1:]:
        if parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            kind = carried_type(hints.get(name, Any))
            if kind is not None and parameter.default is None:
                kind = kind | None
            adapters[name] = None if kind is None else TypeAdapter(kind)
    return adapters


def carried_type(hint: Any) -> Any:
    """The part of an annotation that consists of numbers, texts, lists and dicts; None: there is none."""
    origin, args = get_origin(hint) or hint, get_args(hint)
    if origin in (Union, types.UnionType):
        parts = [part for one in args if (part := carried_type(one)) is not None]
        return Union[(*parts, None)] if parts else None
    if origin is dict:
        return dict[str, Any]
    if origin not in (tuple, *_LISTS):
        return _SCALARS.get(origin)
    item = carried_type(args[0]) if args else Any
    if item is StrictInt:  # some lists of numbers are annotated as lists of int
        item = StrictInt | StrictFloat
    if item is None:
        return None
    # diffusers' ``tuple[int]`` has any length.
    return types.GenericAlias(tuple, (item, ...)) if origin is tuple else types.GenericAlias(list, item)
