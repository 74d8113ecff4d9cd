"""``Secret``: what all processes of a deployment on several hosts have, and no stranger has.

Every socket of ours that listens on a network speaks CURVE (CurveZMQ, RFC 26), with two pairs of keys that are derived
from the secret: one for the sockets that listen, one for those that connect. A client proves with its first message
that it knows the listener's public key, which is never sent and follows from the secret alone; so a process without
the secret does not get past the handshake. Keys of a session are new for each connection: what was recorded can be
neither read nor replayed.
"""

from __future__ import annotations

import hashlib
import os
import stat
from pathlib import Path

import zmq
from zmq.utils import z85

from vllm_omni.errors import ConfigError

MIN_BYTES = 32
MAX_BYTES = 4096
HOW = "make one with: (umask 077; openssl rand -hex 32 > FILE), and copy it to the other hosts"


class Secret:
    """The keys that follow from a secret.

    Args:
        data: at least ``MIN_BYTES`` bytes that cannot be guessed.
    """

    def __init__(self, data: bytes) -> None:
        self._listener = _key_pair(data, b"listener")
        self._caller = _key_pair(data, b"caller")

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Secret:
        """Read the secret of a file; white space around it does not count.

        Raises:
            ConfigError: it cannot be read, other users can read it, or it is too short.
        """
        file = Path(path)
        try:
            with file.open("rb") as opened:
                mode = os.fstat(opened.fileno()).st_mode
                data = opened.read(MAX_BYTES + 1).strip()
        except OSError as exc:
            raise ConfigError(f"token file {file}: {exc.strerror}: {HOW}") from exc
        if stat.S_IMODE(mode) & 0o077:
            raise ConfigError(f"token file {file}: other users can read it: chmod 600 {file}")
        if not MIN_BYTES <= len(data) <= MAX_BYTES:
            raise ConfigError(f"token file {file}: it has {len(data)} bytes, not {MIN_BYTES} to {MAX_BYTES}: {HOW}")
        return cls(data)

    def protect_listener(self, socket: zmq.Socket[bytes]) -> None:
        """Let a socket that will be bound hear processes with the secret alone."""
        socket.curve_server = True
        socket.curve_publickey, socket.curve_secretkey = self._listener

    def protect_caller(self, socket: zmq.Socket[bytes]) -> None:
        """Let a socket that will be connected speak to a listener with the secret alone."""
        socket.curve_serverkey = self._listener[0]
        socket.curve_publickey, socket.curve_secretkey = self._caller


def _key_pair(data: bytes, purpose: bytes) -> tuple[bytes, bytes]:
    """Public and secret key, in Z85; any 32 bytes are a secret key of Curve25519."""
    secret = z85.encode(hashlib.blake2b(data, digest_size=32, person=b"vllm-omni" + purpose[:7]).digest())
    return zmq.curve_public(secret), secret
