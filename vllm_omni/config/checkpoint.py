"""Find out what kind of checkpoint a model is, and which deployment is bundled for it."""

from __future__ import annotations

import importlib.util
import json
import os
import re
from collections.abc import Iterable
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any

from vllm_omni.config.vllm_args import vllm_attribute
from vllm_omni.errors import ConfigError
from vllm_omni.names import suggest

PIPELINE_GROUP = "vllm_omni.pipelines"  # see added_pipelines
DIFFUSERS = "diffusers"  # the model type, and vLLM's config format, of every directory in diffusers' layout
LANGUAGE = "language"  # the model type of every checkpoint that has no pipeline here and that vLLM knows
MODEL_INDEX = "model_index.json"
# Architecture -> the model type of its checkpoints, which name another one: that of layers they share, or of a size.
OF_ARCHITECTURE = {
    **dict.fromkeys(("MiMoAudioModel", "MiMoV2ASRForCausalLM"), "mimo_audio"),
    "HunyuanImage3ForCausalMM": "hunyuan_image_3",
}
# Class in ``model_index.json`` -> the model type of its checkpoints, where they are more than one stage.
OF_PIPELINE = {"GlmImagePipeline": "glm_image"}
# Model type -> that of its checkpoints whose ``enable_audio_output`` is false: they have no talker.
WITHOUT_SPEECH = {"qwen3_omni_moe": "qwen3_omni_moe_thinker"}


def bundled_model_types() -> tuple[str, ...]:
    """The model types of this package."""
    return tuple(sorted(path.stem for path in _bundled_dir().glob("*.yaml")))


def supported_model_types() -> tuple[str, ...]:
    """The model types of this package and of packages that add pipelines."""
    return tuple(sorted({*bundled_model_types(), *added_pipelines()}))


def added_pipelines() -> dict[str, EntryPoint]:
    """Model type -> pipeline class that another package adds by an entry point in the group ``vllm_omni.pipelines``.

    The deployment of the model, ``<model_type>.yaml``, lies beside the module of the class.
    """
    return {entry.name: entry for entry in entry_points(group=PIPELINE_GROUP)}


def read_model_config(model: str | os.PathLike[str], *, revision: str | None = None) -> dict[str, Any]:
    """Read the ``config.json`` of a checkpoint.

    Raises:
        ConfigError: there is none.
    """
    return _read_json(_find_model_file(os.fspath(model), "config.json", revision))


def read_model_type(model: str | os.PathLike[str], *, revision: str | None = None) -> str:
    """Read the model type of a checkpoint: a local directory, or a repository on the Hub.

    It is ``model_type`` of its ``config.json``, or what its architecture says (``OF_ARCHITECTURE``); that in
    ``WITHOUT_SPEECH`` if it has no talker; "diffusers" for a checkpoint with a ``model_index.json``, unless its
    pipeline is one of ``OF_PIPELINE``; "language" for a model type without a pipeline here whose architecture vLLM has.

    Raises:
        ConfigError: there is no such checkpoint, or its model type is not supported.
    """
    model = os.fspath(model)
    if has_model_index(model, revision=revision):
        return OF_PIPELINE.get(read_model_index(model, revision=revision)["_class_name"], DIFFUSERS)
    path = _find_model_file(model, "config.json", revision)
    config = _read_json(path)
    model_type, architectures = config.get("model_type"), config.get("architectures")
    if isinstance(architectures, list):
        model_type = next((OF_ARCHITECTURE[one] for one in architectures if one in OF_ARCHITECTURE), model_type)
    if model_type in WITHOUT_SPEECH and config.get("enable_audio_output") is False:
        return WITHOUT_SPEECH[model_type]
    if model_type in supported_model_types():
        return str(model_type)
    if isinstance(architectures, list) and any(one in _vllm_architectures() for one in architectures):
        return LANGUAGE
    nor = f", and vLLM has no architecture {architectures[0]!r}" if isinstance(architectures, list) else ""
    raise ConfigError(f"{path}: model_type = {model_type!r} is not supported{nor}: {supported(str(model_type))}")


def has_model_index(model: str, *, revision: str | None = None) -> bool:
    """Whether a checkpoint is in diffusers' layout."""
    try:
        _find_model_file(model, MODEL_INDEX, revision)
    except ConfigError:
        return False
    return True


def _read_json(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as exc:
        raise ConfigError(f"{path}: not a JSON object: {exc}") from None
    except OSError as exc:
        raise ConfigError(f"{path}: cannot be read: {exc.strerror}") from exc
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: not a JSON object")
    return values


def _vllm_architectures() -> Iterable[str]:
    registry = vllm_attribute("vllm.model_executor.models.registry", "ModelRegistry")
    return () if registry is None else registry.get_supported_archs()


def read_model_index(model: str, *, revision: str | None = None) -> dict[str, Any]:
    """Read the ``model_index.json`` of a directory in diffusers' layout, or of a repository on the Hub.

    Raises:
        ConfigError: there is none, or it names no pipeline.
    """
    path = _find_model_file(model, MODEL_INDEX, revision)
    index = _read_json(path)
    if not isinstance(index.get("_class_name"), str):
        raise ConfigError(f"{path}: names no pipeline of diffusers: _class_name = {index.get('_class_name')!r}")
    return index


def folder_of(model: str, folder: str, *, revision: str | None = None) -> str:
    """The directory of a folder in a checkpoint; of one on the Hub, it is downloaded.

    Raises:
        ConfigError: there is none.
    """
    directory = Path(model).expanduser()
    if not directory.is_dir():
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

        try:
            directory = Path(snapshot_download(model, revision=revision, allow_patterns=f"{folder}/*"))
        except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as exc:
            raise ConfigError(f"model {model!r}: its folder {folder} cannot be fetched: {exc}") from exc
    if not (directory / folder).is_dir():
        raise ConfigError(f"model {model!r} has no folder {folder}: is the checkpoint complete?")
    return str(directory / folder)


def _find_model_file(model: str, name: str, revision: str | None) -> Path:
    directory = Path(model).expanduser()
    if directory.is_dir():
        if (directory / name).is_file():
            return directory / name
        raise ConfigError(
            f"model {model!r}: the directory has neither {name} nor {MODEL_INDEX}; a checkpoint is needed, "
            f"{supported()}"
        )
    if directory.exists():
        raise ConfigError(f"model {model!r}: it is a file; give the directory of a checkpoint, {supported()}")
    nowhere = f"model {model!r}: no such directory, and no {name} of that name on the Hugging Face Hub"
    if not re.fullmatch(r"(?!(\.|\.\.|~)/)[^/]+/[^/]+", model):
        raise ConfigError(f"{nowhere}; {supported()}")
    try:
        from huggingface_hub import hf_hub_download
        from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
    except ImportError:
        raise ConfigError(f"{nowhere} (huggingface_hub is not installed); {supported()}") from None
    try:
        return Path(hf_hub_download(model, name, revision=revision))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as exc:
        reason = (str(exc).strip().splitlines() or [type(exc).__name__])[0]
        raise ConfigError(f"{nowhere} ({reason}); {supported()}") from exc


def supported(name: str = "") -> str:
    """The supported model types, or the one nearest to a name, for the end of an error message."""
    if name:
        return suggest(name, supported_model_types())
    return f"supported model types: {', '.join(supported_model_types())}"


def default_deployment(model_type: str) -> Path:
    """The YAML file that is bundled with the pipeline of a model type.

    Raises:
        ConfigError: the package that adds the pipeline is not installed or not complete.
    """
    entry = added_pipelines().get(model_type)
    if entry is None:
        return _bundled_dir() / f"{model_type}.yaml"
    try:
        spec = importlib.util.find_spec(entry.module)
    except ImportError as exc:
        raise ConfigError(f"model type {model_type!r}: its package cannot be imported: {exc}") from exc
    if spec is None or spec.origin is None:
        raise ConfigError(f"model type {model_type!r}: plugin module {entry.module} not found")
    return Path(spec.origin).with_name(f"{model_type}.yaml")


def _bundled_dir() -> Path:
    return Path(__file__).parents[1] / "deploy" / "configs"
