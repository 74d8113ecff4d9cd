"""``make_listener``: the port of a front end whose deployment places engines on other hosts."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterable, Iterator

import vllm
from vllm.platforms import current_platform

from vllm_omni import __version__
from vllm_omni.config import OmniConfig, StageConfig
from vllm_omni.config.travel import pack_config
from vllm_omni.engine.relay_options import secret_file_of
from vllm_omni.engine.stage import StageEngine
from vllm_omni.errors import ConfigError
from vllm_omni.hosts.endpoint import Endpoint
from vllm_omni.hosts.listener import HostListener
from vllm_omni.hosts.messages import Identity
from vllm_omni.kv.pool.checkpoint import checkpoint_digest, checkpoint_folder
from vllm_omni.relay.secret import Secret

CONFIGURATION = ("config.json", "generation_config.json", "model_index.json")  # files that are hashed whole


def make_listener(
    config: OmniConfig,
    engines: Iterable[StageEngine],
    on_listening: Callable[[HostListener], None] | None = None,
) -> HostListener | None:
    """Listen for the hosts of a deployment, if it has any, and connect its engines with them.

    Args:
        on_listening: called when they can join.

    Raises:
        ConfigError: there is no address or secret for them, or neither has a use.
    """
    placed = list(_parts_elsewhere(config))
    if not placed:
        if config.listen or config.token_file:
            raise ConfigError("listen, token_file: no stage is on another host: give --stage NAME.host=HOST, too")
        return None
    if not config.listen or not config.token_file:
        name, _, host = placed[0]
        raise ConfigError(
            f"stage {name!r}: host = {host!r}: the host joins this one: give --listen HOST:PORT and --token-file FILE"
        )
    listener = HostListener(
        Endpoint.parse(config.listen, "--listen"),
        Secret.read(secret_file_of(config)),
        identity_of(config.model, config.stages[0].engine_args.get("revision")),
        pack_config(config),
    )
    for name, stage, host in placed:
        listener.add(name, stage.name, host, listener.engines.get(stage.name) if stage.nodes > 1 else None)
    for engine in engines:
        engine.remote = listener.engines.get(engine.name)
    listener.open()
    if on_listening is not None:
        on_listening(listener)
    return listener


def _parts_elsewhere(config: OmniConfig) -> Iterator[tuple[str, StageConfig, str]]:
    """Name, stage and host of the engines on other hosts, or of their parts, also of replicas that may start later."""
    for stage in config.stages:
        for name, host in zip(stage.part_names, stage.part_hosts, strict=True):
            if host is not None:
                yield name, stage, host


def identity_of(model: str, revision: str | None) -> Identity:
    """What all hosts of a deployment must have in common.

    Raises:
        ConfigError: the checkpoint is not on this host.
    """
    folder = checkpoint_folder(model, revision)
    digest = hashlib.sha256()
    for file in (folder / name for name in CONFIGURATION):
        digest.update(file.read_bytes() if file.is_file() else b"-")
    with contextlib.suppress(ConfigError):  # without weights: vLLM's load_format "dummy"
        digest.update(checkpoint_digest(model, revision).encode())
    return Identity(__version__, vllm.__version__, current_platform.device_type, digest.hexdigest()[:16])
