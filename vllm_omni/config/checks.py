"""Check values against type annotations with pydantic, with errors in one style.

A value of a deployment is checked where it is read, one key at a time, so that the message can name its file and line.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, get_type_hints

from pydantic import BeforeValidator, ConfigDict, Field, PydanticUserError, TypeAdapter, ValidationError

from vllm_omni.names import hide_password, suggest

Transport = Literal["auto", "inline", "local", "shm", "tcp", "cuda_ipc", "nixl", "mooncake"]

Count = Annotated[int, Field(ge=1, le=2**31 - 1)]
NumBytes = Annotated[int, Field(ge=0, le=2**62)]
Seconds = Annotated[float, Field(gt=0, le=86400)]


def _to_dict(value: object) -> object:
    if value is None:  # a key of a YAML file with nothing under it
        return {}
    return dict(value) if isinstance(value, Mapping) else value


FromMapping = BeforeValidator(_to_dict)  # of a dict
Section = Annotated[dict[str, Any], FromMapping]


class Problem(ValueError):
    """A value is not valid; the message says what is. ``path`` leads to the value inside the one that was checked."""

    def __init__(self, message: str, *path: str) -> None:
        super().__init__(message)
        self.path = path

    def at(self, place: str, whole: Any) -> str:
        """The message with the value at the path inside ``whole``, and that value's place."""
        for key in self.path:
            whole = _item(whole, key)
        return hide_password(f"{place} = {whole!r}: {self}")

    def below(self, place: str, whole: Any) -> str:
        """As ``at``, where ``place`` is that of ``whole``: the path follows it."""
        return self.at(".".join((place, *self.path)), whole)


def check_field(schema: type, name: str, value: object) -> Any:
    """Check a value for one field of a class; only the validators of the annotation convert it.

    Raises:
        Problem: the value does not fit.
    """
    try:
        return _field_validator(schema, name).validate_python(value, strict=True)
    except ValidationError as exc:
        raise translate(exc, value) from None


def check_section(schema: type, section: Mapping[str, Any], *others: type) -> dict[str, Any]:
    """Check a mapping whose keys are fields of a class, or of one of several.

    Raises:
        Problem: an unknown key, or a value that does not fit.
    """
    schemas = {name: one for one in (schema, *others) for name in _hints(one)}
    checked = {}
    for key, value in section.items():
        if key not in schemas:
            raise Problem(f"unknown key: {suggest(key, schemas)}", key)
        try:
            checked[key] = check_field(schemas[key], key, value)
        except Problem as exc:
            raise Problem(str(exc), key, *exc.path) from None
    return checked


def translate(error: ValidationError, value: object) -> Problem:
    """Translate pydantic's error for a value.

    Pydantic reports an error for each member of a union: the messages for the first place are joined.
    """
    # A struct's validator reports that the value is no instance of it, besides the fields that are wrong.
    details = error.errors(include_url=False)
    found = [_translate(one, value) for one in details if one["type"] != "is_instance_of" or len(details) == 1]
    path = found[0].path
    said = dict.fromkeys(str(one) for one in found if one.path == path)
    return Problem(" or ".join(said).replace(" or must be ", " or "), *path)


def _item(whole: Any, key: str) -> Any:
    """The item of a mapping or list under a key; the whole if there is no such key."""
    if isinstance(whole, Sequence) and not isinstance(whole, str) and key.isdecimal() and int(key) < len(whole):
        return whole[int(key)]
    return whole.get(key, whole) if isinstance(whole, Mapping) else whole


def _translate(detail: Any, value: Any) -> Problem:
    path: list[str] = []
    for key in detail["loc"]:  # keys, and between them names of a union's members
        if (item := _item(value, str(key))) is not value:
            path.append(str(key))
            value = item
    context = detail.get("ctx", {})
    if isinstance(cause := context.get("error"), Problem):
        return Problem(str(cause), *path, *cause.path)
    kind = detail["type"]
    if kind == "literal_error":
        names = [name.strip("'") for name in re.split(", | or ", context["expected"])]
        return Problem(suggest(str(detail["input"]), names), *path)
    if kind in _MESSAGES:
        return Problem(f"must be {_MESSAGES[kind].format(**context)}", *path)
    if cause is not None:
        return Problem(str(cause), *path)
    if kind in ("extra_forbidden", "unexpected_keyword_argument"):
        return Problem("unknown key", *path)
    return Problem(detail["msg"].replace("Input should be", "must be"), *path)


_MESSAGES = {
    "bool_type": "true or false",
    "dict_type": "a mapping",
    "float_parsing": "a number",
    "float_type": "a number",
    "int_from_float": "a whole number",
    "int_parsing": "a whole number",
    "int_type": "a whole number",
    "list_type": "a list",
    "string_type": "text",
    "tuple_type": "a list",
    "greater_than": "above {gt:g}",
    "greater_than_equal": "at least {ge:g}",
    "less_than": "below {lt:g}",
    "less_than_equal": "at most {le}",
}


@functools.cache
def _hints(schema: type) -> Mapping[str, Any]:
    return get_type_hints(schema, include_extras=True)


@functools.cache
def _field_validator(schema: type, name: str) -> TypeAdapter[Any]:
    return validator(_hints(schema)[name])


def validator(hint: Any) -> TypeAdapter[Any]:
    """Pydantic's validator of an annotation, which may name any class."""
    try:
        return TypeAdapter(hint, config=ConfigDict(arbitrary_types_allowed=True))
    except PydanticUserError:  # the annotation is a class with a configuration of its own
        return TypeAdapter(hint)
