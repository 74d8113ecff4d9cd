"""Engine arguments of the instances of a stage: the connectors, and what a deployment gives to single instances."""

from __future__ import annotations

from itertools import product
from typing import Any

from vllm.config import ModelConfig

from vllm_omni.config import StageConfig
from vllm_omni.config.epd import REPLIES, Instance, Tasks, needless_encoder, no_encoder
from vllm_omni.engine.transfer_params import KV_CONFIG, kv_connector
from vllm_omni.errors import ConfigError
from vllm_omni.model_executor.pipeline import StageSpec
from vllm_omni.names import suggest

_SET_BY_THE_MIX = ("ec_transfer_config", KV_CONFIG, "mm_encoder_only")
_EC_CONNECTOR = {
    "ec_connector": "RelayECConnector",
    "ec_connector_module_path": "vllm_omni.kv.ec_connector",
}


def make_instances(config: StageConfig) -> list[Instance]:
    """List the instances of a stage, in the order of its mix.

    Raises:
        ConfigError: an engine argument that the mix sets itself, or one for an instance that does not exist.
    """
    numbered = config.deployment.numbered
    _check_args(config, [*config.deployment.instances, *(f"{kind}{number}" for kind, number in numbered)])
    front = next(kind for kind in config.deployment.mix if kind != Tasks.E)
    return [
        Instance(config.name, kind, number, _instance_args(config, kind, number), (kind, number) == (front, 0))
        for kind, number in numbered
    ]


def _check_args(config: StageConfig, known: list[str]) -> None:
    where = f"stage {config.name!r}: epd.engine_args"
    for name in config.deployment.engine_args:
        if name not in known:
            raise ConfigError(f"{where}.{name}: there is no such instance: {suggest(name, known)}")
    places = {f"stage {config.name!r}: engine_args": config.engine_args}
    places |= {f"{where}.{name}": args for name, args in config.deployment.engine_args.items()}
    for key, (place, args) in product(_SET_BY_THE_MIX, places.items()):
        if args.get(key):
            raise ConfigError(f"{place}.{key}: set by the mix of instances (epd.instances), and cannot be changed")


def check_pictures(config: StageConfig, spec: StageSpec) -> None:
    """Check what a deployment says of pictures.

    Raises:
        ConfigError: the stage generates none.
    """
    if spec.publishes_pictures:
        return
    given = {"unified": config.unified is not None, "epd: G": config.deployment.separates_pictures}
    for key, is_given in given.items():
        if is_given:
            said = "only a language model that generates pictures has this setting, and this one does not: leave it out"
            raise ConfigError(f"stage {config.name!r}: {key}: {said}")


def check_mix(config: StageConfig, model: ModelConfig) -> None:
    """Check that a mix suits the model.

    Raises:
        ConfigError: an encoder is missing or has nothing to encode, or the model has no instances.
    """
    mix = config.deployment.mix
    where = f"stage {config.name!r}: epd"
    if model.is_encoder_decoder:
        raise ConfigError(f"{where}: instances are not supported for an encoder-decoder model: leave the section out")
    if model.supports_multimodal_inputs and not any(Tasks.E in kind for kind in mix):
        raise ConfigError(f"{where}: {no_encoder(mix)}")
    if not model.supports_multimodal_inputs and any(Tasks.E in kind and kind != Tasks.EPD for kind in mix):
        raise ConfigError(f"{where}: {needless_encoder(mix)}")


def _instance_args(config: StageConfig, kind: Tasks, number: int) -> dict[str, Any]:
    """Engine arguments of one instance, which win over the stage's own."""
    deployment = config.deployment
    args: dict[str, Any] = {}
    if deployment.separates_encode:
        role = {Tasks.E: "ec_producer", Tasks.ED: "ec_both"}.get(kind, "ec_consumer")
        args["ec_transfer_config"] = {**_EC_CONNECTOR, "ec_role": role}
    if kind == Tasks.E:
        args["mm_encoder_only"] = True
        if config.engine_args.get("enable_lora") and not config.engine_args.get("enable_tower_connector_lora"):
            args["enable_lora"] = False  # the adapters are for the language model, which this instance lacks
    elif deployment.separates_decode:
        produces, consumes = Tasks.P in kind, bool(kind & REPLIES)
        role = "kv_both" if produces and consumes else "kv_producer" if produces else "kv_consumer"
        args[KV_CONFIG] = kv_connector(role)
    for of in (str(kind), f"{kind}{number}"):
        args |= deployment.engine_args.get(of, {})
    return args
