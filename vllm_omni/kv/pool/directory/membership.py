"""Keeps a node a member of a directory."""

import logging
import threading
from collections.abc import Callable

from vllm_omni.kv.pool.directory.base import SWEEP_PAGES, Directory, Member, check_name, check_seconds

LEASE_S = 3.0

logger = logging.getLogger(__name__)


class Membership:
    """Renews a node's lease three times in its length, and joins again when it was lost, for example with Redis' data.

    Args:
        on_join: is called after every join, in the thread that joined, to publish what the node holds. It must hold the
            lock under which the node evicts: what it publishes has to be there.
    """

    def __init__(
        self,
        directory: Directory,
        node: str,
        *,
        on_join: Callable[[Member], None] = lambda member: None,
        lease_s: float = LEASE_S,
    ):
        check_name(node)
        self.node = node
        self.member: Member | None = None  # None: the directory was not reached yet; may be lost
        self._directory = directory
        self._on_join = on_join
        self._lease_s = check_seconds(lease_s)
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="pool-directory-lease", daemon=True)

    def start(self) -> None:
        """Join, and keep the lease from now on. A directory that is away is joined when it answers."""
        self.step()
        self._thread.start()

    def step(self) -> None:
        """Renew or join, and remove what former members have left; for the thread, and for tests."""
        if self.member is None or not self._directory.renew(self.member):
            member = self._directory.join(self.node, self._lease_s)
            if member is None:
                return
            self.member = member
            self._on_join(member)
        while self._directory.sweep() == SWEEP_PAGES:
            pass  # each is short, so that calls of others come between

    def close(self) -> None:
        """Leave the directory."""
        self._closing.set()
        if self._thread.is_alive():
            self._thread.join()
        if self.member is not None:
            self._directory.leave(self.member)

    def _run(self) -> None:
        while not self._closing.wait(self._lease_s / 3):
            try:
                self.step()
            except Exception:  # without the lease, the node's pages are of no use to others
                logger.exception("A lease of the page directory could not be renewed")  # a node's name may be secret
