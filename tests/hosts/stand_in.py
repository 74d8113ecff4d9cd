"""The first process of a host: it stands for a program that ``tests/zygote.py`` forks into its namespaces, which then
is its child.

    python stand_in.py SOCKET PROGRAM [ARGUMENT...]
"""

import json
import os
import signal
import socket
import sys

NAMESPACES = ("pid", "mnt", "net", "ipc")


def main(address: str, argv: list[str]) -> int:
    """Returns the program's exit code."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as zygote:
        zygote.connect(address)
        program = {"argv": argv, "environ": dict(os.environ), "cwd": os.getcwd(), "session": False, "parent": 1}
        namespaces = [os.open(f"/proc/self/ns/{name}", os.O_RDONLY) for name in NAMESPACES]
        socket.send_fds(zygote, [json.dumps(program).encode()], [0, 1, 2, *namespaces])
        pid = int(zygote.recv(100))
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, _: os.kill(pid, number))
    while True:  # the orphans of a host are its first process's
        ended, status = os.wait()
        if ended == pid:
            code = os.waitstatus_to_exitcode(status)
            return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
