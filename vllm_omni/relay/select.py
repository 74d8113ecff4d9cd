"""Choose the backend of an edge: the one that the deployment names, or the first that works there.

From: SGLang-Omni (communication, Backends); vLLM-Omni (paper), section 3.4 (per-edge connectors).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import closing
from importlib import import_module
from typing import NamedTuple

import torch

from vllm_omni.errors import ConfigError, OmniError
from vllm_omni.relay.base import Relay

logger = logging.getLogger(__name__)

BACKENDS = {
    "local": "vllm_omni.relay.local:LocalRelay",
    "cuda_ipc": "vllm_omni.relay.cuda_ipc:CudaIpcRelay",
    "shm": "vllm_omni.relay.shm:ShmRelay",
    "nixl": "vllm_omni.relay.remote.nixl:NixlRelay",
    "mooncake": "vllm_omni.relay.remote.mooncake:MooncakeRelay",
    "tcp": "vllm_omni.relay.remote.tcp:TcpRelay",
    "inline": "vllm_omni.relay.inline:InlineRelay",
}
"""The fastest first: the order in which ``auto`` tries them."""
LOCAL = "local"
WITHOUT_SLAB = (LOCAL, "inline")
BETWEEN_HOSTS = ("nixl", "mooncake", "tcp")
STREAMING = ("shm", *BETWEEN_HOSTS)
ASKING_FOR_NO_SECRET = ("nixl", "mooncake")
OPEN = "its ports ask for no secret, and the hosts may have different devices: name it where the network is trusted"
PROBE_TIMEOUT_S = 10.0
PROBE_BYTES = 1 << 20


class Placement(NamedTuple):
    """Where the two ends of an edge run."""

    same_process: bool = False
    same_host: bool = True
    devices: tuple[str, str] = ("cpu", "cpu")  # types, of source and target
    same_gpu: bool = False


def make_relay(
    backend: str, num_bytes: int, *, prefault: bool = True, host: str = "127.0.0.1", secret_file: str = ""
) -> Relay:
    """Make a relay with a slab of ``num_bytes``, or with 0 one that only reads.

    Args:
        prefault: map slabs whole when connecting; a process that mostly forwards should not.
        host: where a transport between hosts listens.
        secret_file: of a deployment on several hosts; empty: it is on one.

    Raises:
        MissingDependency: a package that it needs is not installed.
        ConfigError: the secret cannot be read.
    """
    module, _, name = BACKENDS[backend].partition(":")
    relay_cls: Callable[..., Relay] = getattr(import_module(module), name)
    if backend in WITHOUT_SLAB:
        return relay_cls()
    if backend in BETWEEN_HOSTS:
        from vllm_omni.relay.secret import Secret  # needs zmq

        return relay_cls(num_bytes, host=host, secret=Secret.read(secret_file) if secret_file else None)
    return relay_cls(num_bytes, prefault=prefault) if backend == "shm" else relay_cls(num_bytes)


def choose_backend(transport: str, placement: Placement, edge: str, *, streams: bool = False) -> str:
    """Return the backend of an edge; backends that ``auto`` skips are logged with the reason.

    Args:
        transport: a backend's name, or "auto".
        edge: for messages: "thinker->talker".
        streams: whether rows are streamed on the edge.

    Raises:
        ConfigError: the backend that was named cannot work on this edge, or none can; the message says why.
    """
    if transport != "auto":
        if (reason := why_not(transport, placement, streams=streams)) is not None:
            raise ConfigError(f"edge {edge}: transport = {transport!r} cannot work here: {reason}")
        return transport
    skipped_reasons: list[str] = []
    for backend in BACKENDS:
        is_open = backend in ASKING_FOR_NO_SECRET and not placement.same_host
        reason = OPEN if is_open else why_not(backend, placement, streams=streams)
        if reason is None:
            skipped = f" (not {'; not '.join(skipped_reasons)})" if skipped_reasons else ""
            logger.info("edge %s: tensors travel by %s%s", edge, backend, skipped)
            return backend
        skipped_reasons.append(f"{backend}: {reason}")
    raise ConfigError(f"edge {edge}: no transport works here: {'; '.join(skipped_reasons)}")


def suitable(placement: Placement, *, streams: bool = False) -> list[str]:
    """The backends that can carry an edge by where its ends run, the fastest first."""
    return [backend for backend in BACKENDS if not unsuitable(backend, placement, streams=streams)]


def unsuitable(backend: str, placement: Placement, *, streams: bool = False) -> str:
    """Return why a backend cannot carry an edge, by where its ends run; empty: it can."""
    if backend == LOCAL and not placement.same_process:
        return "source and target are different processes"
    if backend in (LOCAL, "shm") and not placement.same_host:
        return "source and target are on different hosts"
    if backend == "cuda_ipc":
        if placement.devices != ("cuda", "cuda"):
            return f"it needs CUDA on both sides, the devices are {' and '.join(placement.devices)}"
        if not (placement.same_host and placement.same_gpu):
            return "source and target are not on the same GPU"
        if placement.same_process:
            return "source and target are one process, which has the tensors"
    if streams and backend not in STREAMING:
        return "it has no streams"
    return ""


def why_not(backend: str, placement: Placement, *, streams: bool = False) -> str | None:
    """Return why a backend cannot carry an edge; None if it has just carried a test tensor.

    ``cuda_ipc`` carries none: that would take memory of the GPU for this process, the front end. The engine makes its
    slab when it loads, and does not start if that fails.
    """
    if reason := unsuitable(backend, placement, streams=streams):
        return reason
    if backend == "cuda_ipc":
        return None
    try:
        _probe(backend)
    except (OmniError, OSError, RuntimeError) as exc:
        return f"{type(exc).__name__}: {exc}"
    return None


def _probe(backend: str) -> None:
    """Carry a test tensor from one relay to another, in this process."""
    sent = torch.arange(PROBE_BYTES // 8)
    with closing(make_relay(backend, 2 * PROBE_BYTES)) as producer, closing(make_relay(backend, 0)) as consumer:
        ref = producer.put_nowait("probe", sent)
        arrived = consumer.get_blocking(ref, PROBE_TIMEOUT_S)
        if not torch.equal(arrived.cpu(), sent):
            raise RuntimeError("a tensor arrived changed")
        consumer.release(ref)
