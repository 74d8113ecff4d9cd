"""What a fork server of ``test_fork_server.py`` imports: it serves the processes that it has forked."""

from vllm_omni.process.fork_server import FORK_SERVER

FORK_SERVER.serve_descendants()
