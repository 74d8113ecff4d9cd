"""File descriptors that must be free before something starts: ZMQ ends the process (abort) if a context has too few."""

import errno
import os
import resource

ZMQ_CONTEXT = 16  # of a context with its first sockets


def check_free_descriptors(count: int) -> None:
    """Check that this process can open so many files.

    Raises:
        OSError: it cannot, or this cannot be determined because not even one descriptor is free.
    """
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    num_free = limit - sum(int(name) < limit for name in os.listdir("/proc/self/fd"))
    if num_free < count:
        raise OSError(errno.EMFILE, f"{num_free} file descriptors are free, {count} are needed (ulimit -n: {limit})")
