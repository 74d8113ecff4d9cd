"""A pipeline that the caller gives: a class, or where to find it."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from inspect import isclass
from pathlib import Path
from typing import Any

from vllm_omni.config.documents import TOP_LEVEL_KEYS, Document, with_string_keys
from vllm_omni.errors import ConfigError
from vllm_omni.names import suggest

_HOW = "must be a class that derives from Pipeline, or its place: 'file.py:MyPipeline', 'package.module:MyPipeline'"


def find_pipeline(given: type | str) -> type[Any]:
    """The class of a pipeline.

    The directory of a file is added to the path of modules, of this process and of the engines that it starts, unless
    it fails.

    Raises:
        ConfigError: there is no such file, module or class, or importing it fails.
    """
    if isclass(given):
        return _checked(given, given.__name__)
    if not isinstance(given, str) or ":" not in given:
        raise ConfigError(f"pipeline = {given!r}: {_HOW}")
    where, _, name = given.rpartition(":")
    if not where.endswith(".py"):
        return _class_of(_import(where, where), name, given)
    with _importable(Path(where)):
        return _class_of(_import_file(Path(where)), name, given)


def deployment_of(pipeline: type[Any]) -> Document:
    """The layer that a given pipeline declares itself, in place of a bundled file.

    Raises:
        ConfigError: it declares no stages.
    """
    source = f"{pipeline.__name__}.deployment"
    values = with_string_keys(getattr(pipeline, "deployment", None) or {})
    if not isinstance(values, dict) or not values.get("stages"):
        example = "{'stages': {'writer': {'engine_type': 'ar'}}}"
        raise ConfigError(f"{source}: must name the stages, with the keys of a deployment file: {example}")
    document = Document(source, values, {}, "bundled")
    document.reject_unknown_keys((), TOP_LEVEL_KEYS)
    return document


def _checked(found: object, given: str) -> type[Any]:
    if not (isclass(found) and hasattr(found, "deployment") and hasattr(found, "check_options")):  # of Pipeline
        raise ConfigError(f"pipeline {given!r}: {_HOW}; this is {found!r}")
    return found


def _class_of(module: Any, name: str, given: str) -> type[Any]:
    found = getattr(module, name, None)
    if found is None:
        classes = [one for one, value in vars(module).items() if isclass(value) and value.__module__ == module.__name__]
        where = given.rpartition(":")[0]
        raise ConfigError(f"pipeline {given!r}: {where} has no class {name!r}; {suggest(name, classes)}")
    return _checked(found, given)


@contextmanager
def _importable(path: Path) -> Iterator[None]:
    """Add the directory of a file to the path of modules; on an error, remove it again, and the file's module."""
    directory, is_known = str(path.parent.resolve()), path.stem in sys.modules
    previous, others = list(sys.path), os.environ.get("PYTHONPATH")
    if directory not in sys.path:
        sys.path.insert(0, directory)
        # The processes of the engines import functions of this module by its name.
        os.environ["PYTHONPATH"] = directory if not others else os.pathsep.join((directory, others))
    try:
        yield
    except BaseException:
        sys.path[:] = previous
        if not is_known:
            sys.modules.pop(path.stem, None)
        if others is None:
            os.environ.pop("PYTHONPATH", None)
        else:
            os.environ["PYTHONPATH"] = others
        raise


def _import_file(path: Path) -> Any:
    if not path.is_file():
        raise ConfigError(f"pipeline: {path}: no such file")
    module = _import(path.stem, str(path))
    if Path(module.__file__ or "").resolve() != path.resolve():
        raise ConfigError(f"pipeline: {path}: a module {path.stem!r} is imported already; rename the file")
    return module


def _import(name: str, where: str) -> Any:
    try:
        return import_module(name)
    except Exception as exc:
        raise ConfigError(f"pipeline: importing {where} failed: {type(exc).__name__}: {exc}") from exc
