"""``Endpoint``: the host and port of a front end."""

from __future__ import annotations

import re
import socket
from typing import NamedTuple

from vllm_omni.errors import ConfigError

_FORM = re.compile(r"(?:\[(?P<v6>[^\]]+)\]|(?P<host>[^:\[\]]+)):(?P<port>[0-9]{1,5})")
WILDCARDS = ("0.0.0.0", "::", "*")


class Endpoint(NamedTuple):
    """A name or address, and a port."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str, flag: str) -> Endpoint:
        """Read ``HOST:PORT`` or ``[IPv6]:PORT``. Raises ``ConfigError``, which names the flag."""
        found = _FORM.fullmatch(text)
        if found is None or not 0 < int(found["port"]) < 1 << 16:
            raise ConfigError(f"{flag} {text}: must be HOST:PORT, for example 10.0.0.1:7654 or [fd00::1]:7654")
        return cls(found["v6"] or found["host"], int(found["port"]))

    def resolve(self) -> Endpoint:
        """The same with a numeric address. Raises ``OSError``: the name is unknown."""
        *_, address = socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)[0]
        return Endpoint(str(address[0]), self.port)

    def own_address(self) -> str:
        """The address of this host from which packets to the endpoint leave. Raises ``OSError``: there is no way."""
        family, _, _, _, address = socket.getaddrinfo(self.host, self.port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as one:
            one.connect(address)  # sends nothing
            return str(one.getsockname()[0])

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"
