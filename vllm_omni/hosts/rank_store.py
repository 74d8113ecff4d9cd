"""``open_store``: where the ranks of an engine that spans hosts exchange their addresses."""

from __future__ import annotations

import socket

from torch.distributed import TCPStore


def open_store(address: str) -> TCPStore:
    """Listen at a free port of one address of this host, for as long as the store is referred to.

    torch would listen at all interfaces, unless it gets a socket that is bound.
    """
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as listening:
        listening.bind((address, 0))
        port = listening.getsockname()[1]
        # torch closes the descriptor at the store's end.
        return TCPStore(address, port, None, True, wait_for_workers=False, master_listen_fd=listening.detach())
