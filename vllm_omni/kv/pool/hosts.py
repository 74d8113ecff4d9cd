"""``Hosts``: an engine's part in a pool of several hosts, whose directory is in Redis."""

from __future__ import annotations

from contextlib import closing

from vllm_omni.kv.pool.announcer import Announcer
from vllm_omni.kv.pool.directory import Layout
from vllm_omni.kv.pool.directory.redis import RedisDirectory, RedisServer
from vllm_omni.kv.pool.remote_pages import LIMITS, Limits, RemotePages
from vllm_omni.kv.pool.slab import Slab
from vllm_omni.relay.remote.pages import PageRelay
from vllm_omni.relay.secret import Secret


def check_url(url: str) -> None:
    """Check a URL; nothing is connected.

    Raises:
        ConfigError: it is none of Redis.
    """
    with closing(RedisServer(url)):
        pass


class Hosts:
    """Publishes what a slab holds, serves it, and reads what other hosts have.

    There are two connections to Redis, so that one which is too slow for lookups, and is not asked for a while, still
    renews leases: these may take longer.

    Args:
        layout: id of the slab's pages.
        secret: that the engines of the pool have: others read nothing of it; None: there is none.

    Raises:
        ConfigError: not a URL of Redis.
    """

    def __init__(self, url: str, layout: str, *, secret: Secret | None = None, limits: Limits = LIMITS) -> None:
        self._secret = secret
        self._limits = limits
        self._server = RedisServer(url, timeout_s=limits.call_s)
        self._lookup_server = RedisServer(url, timeout_s=limits.lookup_s)
        self._directories = [RedisDirectory(server, Layout(layout)) for server in (self._server, self._lookup_server)]
        self.announcer = Announcer(self._directories[0])
        self._relay: PageRelay | None = None
        self._pages: RemotePages | None = None

    @property
    def pages(self) -> RemotePages:
        assert self._pages is not None, "it was started"
        return self._pages

    def start(self, slab: Slab, host: str) -> None:
        """Listen, join the directory, and publish.

        Args:
            slab: made with the methods of ``announcer``; it is closed after this object.
            host: address of this host that the others reach.

        Raises:
            RelayError: the address cannot be listened at.
        """
        self._relay = PageRelay(slab.slots, slab.page_bytes, slab.stride, host=host, secret=self._secret)
        self._pages = RemotePages(
            self._directories[1],
            self._relay,
            slab.page_bytes,
            node=self._relay.name,
            member=lambda: self.announcer.member,
            limits=self._limits,
        )
        self.announcer.start(slab, self._relay.name)

    def close(self) -> None:
        """Leave the directory and close all connections; no thread loads or stores pages any longer."""
        if self._pages is not None:
            self._pages.close()
        self.announcer.close()
        if self._relay is not None:
            self._relay.close()
        for directory in self._directories:
            directory.close()
        for server in (self._server, self._lookup_server):
            server.close()
