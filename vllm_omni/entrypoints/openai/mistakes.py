"""What is wrong with a body, in the words of its fields: pydantic's errors, and unknown fields."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from inspect import isclass
from reprlib import Repr
from typing import Any, get_args

from pydantic import BaseModel
from vllm.entrypoints.serve.exception_handling.handlers.validation import clean_loc_for_param

from vllm_omni.errors import InvalidRequest
from vllm_omni.names import suggest

MAX_REPORTED = 3  # of the mistakes in one body
TAGS = ("role", "type")  # fields that say of which class an object is


def invalid_body(errors: Sequence[Mapping[str, Any]], body: Any) -> InvalidRequest:
    """The error for a body that pydantic rejected; ``body`` is its type."""
    errors = nearest_classes(errors, body)
    errors = sorted(errors, key=lambda error: error["type"] != "extra_forbidden")  # a misspelt field, then the missing
    said = list(dict.fromkeys(_mistake(error, body) for error in errors))
    more = f"; and {len(said) - MAX_REPORTED} more" if len(said) > MAX_REPORTED else ""
    return InvalidRequest("; ".join(said[:MAX_REPORTED]) + more, param=_param(errors[0]))


def check_fields(request: BaseModel, ignored: Iterable[str] = ()) -> None:
    """Raise ``InvalidRequest`` for a field that the body's class does not have; ``ignored`` are accepted, too."""
    for name in request.model_extra or ():
        if name not in ignored:
            fields = type(request).model_fields
            raise InvalidRequest(f"unknown field {name!r}: {suggest(name, fields)}", param=name)


def shorten(value: object) -> str:
    """``repr``, without writing out what is long or nested."""
    short = Repr()
    short.maxstring = short.maxother = 80
    return short.repr(value)


def _param(error: Mapping[str, Any]) -> str:
    path = tuple(part for part in error["loc"] if not _is_class(part))  # without names of classes
    return clean_loc_for_param(path).removeprefix("body.")


def _mistake(error: Mapping[str, Any], body: Any) -> str:
    param = _param(error)
    if error["type"] == "extra_forbidden":
        *path, name = (part for part in error["loc"] if part != "body")
        return f"unknown field {param!r}: {suggest(name, _fields_at(body, path))}"
    if error["type"] == "missing":
        return f"{param}: is missing"
    if error["type"] == "json_invalid":
        return f"the body is not valid JSON: {error['ctx']['error']}"
    if error["type"] == "value_error":  # of a validator, which says it all
        return str(error["msg"].removeprefix("Value error, "))
    return f"{param} = {shorten(error['input'])}: {error['msg'][0].lower()}{error['msg'][1:]}"


def _fields_at(body: Any, path: Iterable[str | int]) -> Iterable[str]:
    """The names of the fields of the object at a path within a body."""
    return [name for one in _models_at(body, path) for name in one.model_fields]


def _models_at(body: Any, path: Iterable[str | int]) -> list[type[BaseModel]]:
    """The classes that the object at a path within a body may have."""
    models = _models(body)
    for part in path:
        fields = [one.model_fields[str(part)] for one in models if part in one.model_fields]
        models = [model for field in fields for model in _models(field.annotation)] if fields else models
    return models


def _models(annotation: Any) -> list[type[BaseModel]]:
    return [one for one in (annotation, *get_args(annotation)) if isclass(one) and issubclass(one, BaseModel)]


# -- objects of one of several classes ---------------------------------------------------------------------------------


def nearest_classes(errors: Sequence[Mapping[str, Any]], body: Any) -> Sequence[Mapping[str, Any]]:
    """Keep the mistakes that an object has as the class that it was probably meant to be.

    Of an object that may be of several classes, pydantic reports the mistakes that it has as each of them. It is meant
    to be of the class whose role or type it has, and among these of the one as which it has the fewest mistakes. Of an
    object with another role or type, that alone is a mistake.
    """
    for depth in range(max(len(error["loc"]) for error in errors)):
        objects: dict[Any, dict[str, list[Mapping[str, Any]]]] = {}
        for error in errors:
            for name in _classes_at(error, depth, body):
                objects.setdefault(error["loc"][:depth], {}).setdefault(name, []).append(error)
        kept, others = set[int](), set[int]()
        for classes in objects.values():
            others.update(id(error) for mistakes in classes.values() for error in mistakes)
            kept.update(map(id, _nearest(classes.values(), depth)))
        errors = [error for error in errors if id(error) in kept or id(error) not in others]
    return errors


def _nearest(classes: Iterable[Sequence[Mapping[str, Any]]], depth: int) -> list[Mapping[str, Any]]:
    """The mistakes to report of those that an object has as each class."""
    own = [mistakes for mistakes in classes if not any(_is_tag(error, depth) for error in mistakes)]
    if not own:
        return [error for mistakes in classes for error in mistakes if _is_tag(error, depth)]
    fewest = min(map(_num_fields, own))
    return [error for mistakes in own if _num_fields(mistakes) == fewest for error in mistakes]


def _num_fields(mistakes: Iterable[Mapping[str, Any]]) -> int:
    return len({_param(error) for error in mistakes})


def _is_tag(error: Mapping[str, Any], depth: int) -> bool:
    """Whether the object at this depth has the role or type of another class."""
    return error["type"] == "literal_error" and error["loc"][depth + 1 :] in ((tag,) for tag in TAGS)


def _classes_at(error: Mapping[str, Any], depth: int, body: Any) -> list[str]:
    """The classes to which a mistake belongs, if the object at this depth of its path may be of several."""
    path = error["loc"]
    if len(path) < depth + 2:
        return []
    label = str(path[depth])
    if _is_class(label):
        return [label]
    if not label.startswith("function-"):
        return []
    # A validator of each class, under the same name for all of them.
    models = _models_at(body, [part for part in path[:depth] if part != "body"])
    return [model.__name__ for model in models if _belongs(error, path[depth + 1], model)]


def _belongs(error: Mapping[str, Any], field: Any, model: type[BaseModel]) -> bool:
    if field not in model.model_fields:
        return False
    is_literal = error["type"] == "literal_error"
    return not is_literal or error["input"] not in get_args(model.model_fields[field].annotation)


def _is_class(part: object) -> bool:
    return str(part)[:1].isupper()
