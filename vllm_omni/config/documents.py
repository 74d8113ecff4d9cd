"""Read deployment files: YAML with the line of each key, for messages and origins.

A document accepts what JSON has, anchors and merge keys; it rejects tags, keys that are no words and keys given twice.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import yaml

from vllm_omni.config.model import Origin
from vllm_omni.errors import ConfigError
from vllm_omni.names import hide_password, suggest

TOP_LEVEL_KEYS = ("model_type", "stages", "edges", "engine_args", "voices")

KeyPath = tuple[str, ...]  # keys from the top of a document


class Document(NamedTuple):
    """One layer of a deployment: a file, a mapping, keywords or a flag."""

    source: str  # a file's name, "overrides", the keyword "epd", the text of a flag; empty for engine arguments
    values: dict[str, Any]
    lines: dict[KeyPath, int]  # of each key, from 1; empty unless it came from a file
    kind: Literal["bundled", "file", "overrides", "argument", "stage"] = "file"

    def origin(self, path: KeyPath) -> Origin:
        """Where the value of a key comes from."""
        return Origin(self.kind, self.source or path[-1], self.lines.get(path))

    def at(self, path: KeyPath) -> str:
        """The place of a key, for a message: ``deploy.yaml:12: stages.thinker.dtype``."""
        if not self.source:
            return f"engine argument {path[-1]!r}"
        if self.kind == "stage":
            return f"--stage {'.'.join(path[1:])}"
        if self.kind == "argument":  # text for "epd" itself holds the instances
            return "epd" if path[3:] == ("instances",) else ".".join(path[2:])
        line = f":{self.lines[path]}" if path in self.lines else ""
        return f"{self.source}{line}: {'.'.join(path)}"

    def mapping(self, *path: str) -> dict[str, Any]:
        """The mapping at a path, empty if there is none; raises ``ConfigError`` for another value."""
        value: Any = self.values
        for key in path:
            value = value.get(key)
            if value is None:  # absent, or a key with nothing under it
                return {}
        if not isinstance(value, dict):
            raise ConfigError(hide_password(f"{self.at(path)} = {value!r}: must be a mapping"))
        return value

    def reject_unknown_keys(self, path: KeyPath, valid: Iterable[str]) -> None:
        """Raise ``ConfigError`` for a key of the mapping at ``path`` that is not valid, with the nearest one."""
        valid = tuple(valid)
        for key in self.mapping(*path):
            if key not in valid:
                raise ConfigError(f"{self.at((*path, key))}: unknown key {key!r}: {suggest(key, valid)}")


def read_yaml_file(path: Path, kind: str = "deployment file", keys: Sequence[str] = TOP_LEVEL_KEYS) -> Document:
    """Read a deployment file, or a file of another kind with other keys.

    Raises:
        ConfigError: it cannot be read, or is not plain YAML with a mapping at the top.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as exc:
        reason = exc.strerror if isinstance(exc, OSError) else exc
        raise ConfigError(f"{kind} {str(path)!r} cannot be read: {reason}") from exc
    document = parse_yaml(text, str(path))
    value = document.values["value"]
    if value is not None and not isinstance(value, dict):
        raise ConfigError(f"{path}: must be a mapping with the keys {', '.join(keys)}")
    return Document(str(path), value or {}, document.lines)


def parse_yaml(text: str, source: str) -> Document:
    """Parse text as ``{"value": ...}`` with the line of each key; raises ``ConfigError`` unless it is plain YAML."""
    loader = yaml.SafeLoader(text)
    constructor = _Constructor(loader, source)
    try:
        node = loader.get_single_node()
        value = None if node is None else constructor.construct(node)
    except yaml.MarkedYAMLError as exc:
        line = "" if exc.problem_mark is None else f":{exc.problem_mark.line + 1}"
        raise ConfigError(f"{source}{line}: not valid YAML: {exc.problem or exc}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as exc:  # a date such as 2001-13-45; a mapping in itself
        raise ConfigError(f"{source}: not valid YAML: {exc}") from None
    finally:
        loader.dispose()
    return Document(source, {"value": value}, constructor.lines)


class _Constructor:
    """Builds plain values from YAML nodes and notes the line of each key."""

    def __init__(self, loader: yaml.SafeLoader, source: str) -> None:
        self._loader = loader
        self._source = source
        self.lines: dict[KeyPath, int] = {}

    def construct(self, node: yaml.Node, path: KeyPath = ()) -> Any:
        if isinstance(node, yaml.ScalarNode):
            if node.tag == "tag:yaml.org,2002:str" and node.style is None:
                return _yaml_1_2_float(node.value)
            return self._loader.construct_object(node, deep=True)
        if node.tag not in _YAML_COLLECTIONS:
            raise self._error(node, path, f"no tag {node.tag!r} here")
        if isinstance(node, yaml.SequenceNode):
            return [self.construct(item, (*path, str(i))) for i, item in enumerate(node.value)]
        assert isinstance(node, yaml.MappingNode), "YAML has three kinds of node"
        self._check_keys(node, path)
        self._loader.flatten_mapping(node)  # `<<: *anchor`
        values = {}
        for key_node, value_node in node.value:
            key = str(key_node.value)
            self.lines[(*path, key)] = key_node.start_mark.line + 1
            values[key] = self.construct(value_node, (*path, key))
        return values

    def _check_keys(self, node: yaml.MappingNode, path: KeyPath) -> None:
        """Raise for keys that are no words or given twice, before merge keys add others."""
        written: dict[str, int] = {}
        for key_node, _ in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                raise self._error(key_node, path, "a key must be a plain word")
            key = key_node.value
            if key in written and key_node.tag != "tag:yaml.org,2002:merge":
                raise self._error(key_node, (*path, key), f"given twice, first on line {written[key]}")
            written[key] = key_node.start_mark.line + 1

    def _error(self, node: yaml.Node, path: KeyPath, message: str) -> ConfigError:
        return ConfigError(f"{self._source}:{node.start_mark.line + 1}: {'.'.join(path) or 'top level'}: {message}")


_YAML_COLLECTIONS = ("tag:yaml.org,2002:map", "tag:yaml.org,2002:seq")


def _yaml_1_2_float(text: str) -> str | float:
    """Read ``1e-3`` as a number, as YAML 1.2 does; PyYAML follows YAML 1.1, where it is text."""
    if "e" in text.lower() and text[:1] in "+-.0123456789":
        try:
            return float(text)
        except ValueError:
            return text
    return text


def dump_value(value: Any) -> str:
    """Write a value on one line, so that ``load_config`` reads it back."""
    text = yaml.safe_dump(value, default_flow_style=True, width=math.inf, allow_unicode=True, sort_keys=False)
    text = text.removesuffix("...\n").strip()
    # PyYAML writes the text "1e3" without quotes, which is a number here, and text with a line break on several lines.
    is_read = "\n" not in text and parse_yaml(text, "").values["value"] == value
    return text if is_read else json.dumps(value, ensure_ascii=False)


def with_string_keys(value: Any) -> Any:
    """``{0: {...}}`` with keys as text, as in YAML."""
    if isinstance(value, Mapping):
        return {str(key): with_string_keys(item) for key, item in value.items()}
    return value
