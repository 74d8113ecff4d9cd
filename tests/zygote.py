"""Programs that use vLLM, forked from a process that has imported it: importing takes a core some ten seconds in each
program, and as long again in its fork server.

    Popen([vllm, "serve", MODEL, "--omni"], env=environ, stdout=log)   # as subprocess.Popen

Each process that runs tests has one such process, started with its first program. What is forked becomes a child of the
process that runs tests, and has a fork server of its own, an environment, arguments, files, a session where it asks for
one, and the end of a program that was started. A program whose imports would read another environment is started, not
forked, and so are commands that are none of Python's. Tests of a start itself use ``subprocess``.
"""

import atexit
import ctypes
import gc
import importlib
import inspect
import json
import multiprocessing.util
import os
import runpy
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from multiprocessing import connection, forkserver, resource_tracker
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

import setproctitle

from vllm_omni import envs
from vllm_omni.entrypoints.cli.main import QUIET
from vllm_omni.entrypoints.cli.quiet import SERVER_VARIABLES, VARIABLES
from vllm_omni.process import fork_server

PR_SET_CHILD_SUBREAPER = 36
START_TIMEOUT_S = 120.0
MAX_REQUEST = 1 << 17
NUM_NAMESPACES = 4
IMPORTED = (
    "vllm.entrypoints.cli.main",
    "vllm.v1.engine.core",
    "vllm.v1.worker.cpu_worker",
    "vllm_omni.core.sched.diffusion",
    "vllm_omni.core.sched.epd",
    "vllm_omni.core.sched.generation",
    "vllm_omni.entrypoints.cli.serve",
    "vllm_omni.entrypoints.omni_llm",
    "vllm_omni.entrypoints.openai.app",
    "vllm_omni.entrypoints.openai.diffusion_app",
    "vllm_omni.model_executor.diffusers_executor",
    "vllm_omni.model_executor.generation_executor",
    "vllm_omni.worker.cpu_worker",
)
SET_BY_FRONT_ENDS = (
    "LD_PRELOAD",
    "NUMEXPR_MAX_THREADS",
    "OMP_WAIT_POLICY",
    "TORCHINDUCTOR_COMPILE_THREADS",
    "TORCHINDUCTOR_CPP_DYNAMIC_THREADS",
    "VLLM_DISABLE_SHARED_EXPERTS_STREAM",
    "VLLM_SSM_CONV_STATE_LAYOUT",
    "VLLM_WORKER_MULTIPROC_METHOD",
    *(VARIABLES.keys() - {"VLLM_LOGGING_LEVEL"}),
    *SERVER_VARIABLES,
)
"""Environment variables that a front end sets for its stages, which are forked from the same imports as itself here."""

SET_BY_IMPORTS = (
    "AITER_SITUV2_A4W4",
    "LD_LIBRARY_PATH",
    "PYTORCH_NVML_BASED_CUDA_CHECK",
    "RAY_CLIENT_MODE",
    "TILELANG_CLEANUP_TEMP_FILES",
    "TRITON_CACHE_AUTOTUNING",
)
"""Those that imports of vLLM, and of cv2, set."""

READ_LATE = (
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY",
    "OTEL_BSP_SCHEDULE_DELAY",
    "PATH",
    "PYTHONPATH",
    "TORCHDYNAMO_DISABLE",
    "UCX_NET_DEVICES",
    "UCX_TLS",
    "VLLM_CPU_KVCACHE_SPACE",
    "VLLM_LOGGING_LEVEL",
    "VLLM_MEDIA_FETCH_MAX_RETRIES",
    "VLLM_OBJECT_STORAGE_SHM_BUFFER_NAME",
    "VLLM_SERVER_DEV_MODE",
    "VLLM_USE_V2_MODEL_RUNNER",
)
"""Those that no import reads, or that ``_become`` applies to what was imported."""


def _read_by_stages() -> dict[str, str]:
    """Those of ``SET_BY_FRONT_ENDS`` that imports of a stage read, as vLLM and our command set them on a CPU."""
    torch, vllm = (Path(str(find_spec(name).origin)).parent for name in ("torch", "vllm"))  # type: ignore[union-attr]
    openmp = [*torch.parent.glob("torch.libs/libgomp*.so*"), *torch.glob("lib/libgomp*.so*")]
    malloc = [*vllm.glob("libs/libtcmalloc_minimal*.so*")]
    threads = {"TORCHINDUCTOR_COMPILE_THREADS": "1", "TORCHINDUCTOR_CPP_DYNAMIC_THREADS": "1"}
    preloaded = ":".join(str(found[0]) for found in (malloc, openmp) if found)
    return {"LD_PRELOAD": preloaded, "OMP_WAIT_POLICY": "PASSIVE", **threads, **SERVER_VARIABLES}


def _read_by_imports(environment: Mapping[str, str]) -> dict[str, str]:
    late = (*fork_server.UNREAD, *SET_BY_FRONT_ENDS, *SET_BY_IMPORTS, *READ_LATE)
    names = [name for name in environment if name not in late]
    return {name: environment[name] for name in names if not fork_server._is_read_late(name)}


class Popen(subprocess.Popen[Any]):
    """``subprocess.Popen`` that forks a program of Python where it can.

    Args:
        forks: the program forks those of Python that it starts itself: ``subprocess.Popen`` is this class there.
    """

    def __init__(self, *args: Any, forks: bool = False, **options: Any) -> None:
        self._forks = forks
        super().__init__(*args, **options)

    def _execute_child(self, *args: Any) -> None:
        given = inspect.signature(super()._execute_child).bind(*args).arguments  # type: ignore[misc]
        environ = dict(os.environ if given["env"] is None else given["env"])
        argv = _program(given["args"], environ.get("PATH"))
        is_plain = not any(given[name] for name in ("shell", "preexec_fn", "pass_fds"))
        if not (argv and is_plain and _ZYGOTE.can_fork(environ)):
            super()._execute_child(*args)  # type: ignore[misc]
            return
        pipes = [given[name] for name in ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")]
        files = [number if fd == -1 else fd for number, fd in enumerate(pipes[i] for i in (0, 3, 5))]
        program = {"argv": argv, "environ": environ, "cwd": str(given["cwd"] or os.getcwd()), "forks": self._forks}
        try:
            self.pid = _ZYGOTE.fork(program | {"session": given["start_new_session"]}, files)
        finally:
            self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]
        self._child_created = True


def run(
    command: Sequence[Any], *, timeout: float, input: str | None = None, **options: Any
) -> "subprocess.CompletedProcess[str]":
    """``subprocess.run``, with its output as text."""
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with Popen(command, text=True, **pipes, **options) as process:
        try:
            stdout, stderr = process.communicate(input, timeout=timeout)
        except BaseException:
            process.kill()
            raise
    return subprocess.CompletedProcess(command, process.returncode, stdout, stderr)


def _program(command: Sequence[Any], path: str | None) -> list[str]:
    """The file of a program of Python, or "-m" and a module, and its arguments; empty: it is none."""
    name, *words = [os.fspath(word) for word in command]
    file = shutil.which(name, path=path)
    python = Path(sys.executable)
    if file == str(python) and words and (words[0].endswith(".py") or words[0] == "-m"):
        return words
    return [file, *words] if file in (str(python.with_name("vllm")), str(python.with_name("vllm-omni"))) else []


class _Zygote:
    """The process that has imported what programs need.

    Attributes:
        address: of the socket at which it forks programs into other namespaces (``tests/hosts/stand_in.py``).
    """

    def __init__(self) -> None:
        self.address = ""
        self._control: socket.socket | None = None
        self._imported_with: dict[str, str] = {}

    def can_fork(self, environ: Mapping[str, str]) -> bool:
        """Whether a program's imports would be as those of the zygote."""
        if self._control is None:
            self._start()
        return _read_by_imports(environ) == self._imported_with

    def _start(self) -> None:
        its, listener = self._connect(os.environ)
        files = [its.fileno(), listener.fileno()]
        with its, listener:
            command = [sys.executable, __file__, *map(str, files)]
            environ = os.environ | _read_by_stages()
            process = subprocess.Popen(command, env=environ, pass_fds=files, stdin=subprocess.DEVNULL)
        atexit.register(_end, os.getpid(), process.wait, self._control, self.address)

    def fork_itself(self, environ: Mapping[str, str], files: list[int]) -> None:
        """Fork it from this process, which is one itself and is to become a program with this environment and files."""
        its, listener = self._connect(environ)
        if not (pid := os.fork()):
            assert self._control is not None
            self._control.close()
            for fd in files:
                os.close(fd)
            _main(its, listener)
        its.close()
        listener.close()
        atexit.register(_end, os.getpid(), lambda: os.waitpid(pid, 0), self._control, self.address)

    def _connect(self, environ: Mapping[str, str]) -> tuple[socket.socket, socket.socket]:
        """Its ends of two sockets, at which it is asked for programs: by this process, and at ``address``."""
        self.address = tempfile.mkdtemp(prefix="zygote-", dir="/tmp") + "/forks"  # the path of a socket must be short
        self._control, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control.settimeout(START_TIMEOUT_S)
        self._imported_with = _read_by_imports(environ)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        listener.bind(self.address)
        listener.listen()
        return its, listener

    def fork(self, program: dict[str, Any], files: list[int]) -> int:
        """Fork a program; returns its process id, a child of this process."""
        assert self._control is not None
        _adopt(True)
        try:
            request = json.dumps(program | {"parent": os.getpid()})
            socket.send_fds(self._control, [request.encode()], files)
            pid = self._control.recv(MAX_REQUEST)
        finally:
            _adopt(False)
        assert pid, "the program could not be forked"
        return int(pid)


def _adopt(orphans: bool) -> None:
    """Let this process become the parent of its descendants' orphans, or init."""
    assert ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, int(orphans), 0, 0, 0) == 0


def _end(owner: int, wait: Callable[[], object], control: socket.socket, address: str) -> None:
    if os.getpid() != owner:  # a fork server that it has forked ends like a program
        return
    control.shutdown(socket.SHUT_RDWR)  # a fork server may hold the socket, too
    control.close()
    wait()
    shutil.rmtree(os.path.dirname(address))


_ZYGOTE = _Zygote()


def ensure_running() -> None:
    """Start the process that forks programs now, for a test that counts processes."""
    _ZYGOTE.can_fork(os.environ)


def stand_in(command: Sequence[Any], environ: Mapping[str, str]) -> list[str]:
    """The command of a process that takes a program's place in other namespaces; the program itself, if that cannot be
    forked."""
    argv = _program(command, environ.get("PATH"))
    if not (argv and _ZYGOTE.can_fork(environ)):
        return [os.fspath(word) for word in command]
    return [sys.executable, str(Path(__file__).with_name("hosts") / "stand_in.py"), _ZYGOTE.address, *argv]


# -- in the zygote -----------------------------------------------------------------------------------------------------


def _serve(control: socket.socket, listener: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """Fork programs until the process that runs tests has ended; returns in each, what it is to be, or None here."""
    for name in IMPORTED:
        importlib.import_module(name)
    vllm_patches = importlib.import_module("vllm_omni.vllm_patches")
    vllm_patches.register_kernels_once()  # as each fork server would
    vllm_patches.configure_logging_at_once()
    setproctitle.getproctitle()  # it finds what it writes to by the environment, which changes in programs
    gc.collect()
    gc.freeze()  # a collection would write to, and thereby copy, pages that all programs share
    while True:
        (ready, *_), _, _ = select.select([control, listener], [], [])
        asks = control if ready is control else listener.accept()[0]
        message, files, _, _ = socket.recv_fds(asks, MAX_REQUEST, 3 + NUM_NAMESPACES)
        if not message and asks is control:
            return None
        if message and not (middle := os.fork()):
            for namespace in files[3:]:
                assert ctypes.CDLL(None).setns(namespace, 0) == 0
            # What is the orphan of a process in a namespace is adopted there; setns moves children, not this process.
            for _ in range(2 if files[3:] else 1):
                if os.fork():
                    os._exit(0)
            program = json.loads(message)
            while os.getppid() != program["parent"]:
                time.sleep(0.001)
            asks.send(str(os.getpid()).encode())
            for end in (asks, control, listener):
                end.close()
            return program, files
        if message and os.waitpid(middle, 0)[1]:
            asks.send(b"")
        if asks is not control:
            asks.close()
        for fd in files:
            os.close(fd)


def _become(program: dict[str, Any], files: list[int]) -> None:
    """Make this process that of a program, up to its first line."""
    if program.get("forks"):
        _ZYGOTE.fork_itself(program["environ"], files)
        subprocess.Popen = Popen  # type: ignore[misc]
        sys.modules["tests.zygote"] = sys.modules["__main__"]  # as programs of hosts are started
    if program["session"]:
        os.setsid()
    for number, fd in enumerate(files[:3]):
        os.dup2(fd, number)
    for fd in files:
        os.close(fd)
    os.chdir(program["cwd"])
    at_imports = {name: os.environ[name] for name in SET_BY_FRONT_ENDS if name in os.environ}
    os.environ.clear()
    os.environ.update(program["environ"] | at_imports)
    tempfile.tempdir = None  # cached by an import
    sys.argv[:] = program["argv"]
    sys.path[0] = os.getcwd() if sys.argv[0] == "-m" else str(Path(sys.argv[0]).resolve().parent)
    sys.path[1:1] = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path not in sys.path]
    importlib.import_module("vllm.logger")._configure_vllm_root_logger()
    if os.environ.get("TORCHDYNAMO_DISABLE") == "1":
        importlib.import_module("torch").compiler.set_stance("force_eager")
    if envs.VLLM_OMNI_FORK_SERVER:
        is_quiet = Path(sys.argv[0]).name == "vllm-omni" and {*sys.argv[1:2]} <= {*QUIET}
        _fork_its_fork_server(stdout=2 if is_quiet else 1)


def _run() -> None:
    """Run the program that ``sys.argv`` names."""
    if sys.argv[0] == "-m":
        del sys.argv[0]
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        return
    main = ModuleType("__main__")
    main.__file__ = os.path.abspath(sys.argv[0])
    sys.modules["__main__"] = main
    exec(compile(Path(main.__file__).read_bytes(), main.__file__, "exec"), main.__dict__)


def _fork_its_fork_server(stdout: int) -> None:
    """What ``FORK_SERVER.ensure_running`` does, but for the imports: later, this process may have threads.

    Args:
        stdout: what it will write to: commands whose answer is their output redirect it before they start stages.
    """
    fork_server.READ_LATE = (*fork_server.READ_LATE, *SET_BY_FRONT_ENDS)  # type: ignore[assignment]
    resource_tracker.ensure_running()
    listener = socket.socket(socket.AF_UNIX)
    address = connection.arbitrary_address("AF_UNIX")  # type: ignore[attr-defined]
    listener.bind(address)
    os.chmod(address, 0o600)
    listener.listen()
    alive, ours = os.pipe()
    if not (pid := os.fork()):
        os.close(ours)
        os.dup2(stdout, 1)
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})  # as supervisor.in_thread
        multiprocessing.util._finalizer_registry.clear()  # type: ignore[attr-defined]  # its parent's directory
        importlib.import_module("vllm_omni.engine.preloaded")
        forkserver.main(listener.detach(), alive, [])  # type: ignore[attr-defined]
    os.close(alive)
    listener.close()
    running: Any = forkserver._forkserver  # type: ignore[attr-defined]
    running._forkserver_address, running._forkserver_alive_fd, running._forkserver_pid = address, ours, pid
    fork_server.FORK_SERVER._environment = fork_server._read_early()


def _main(control: socket.socket, listener: socket.socket) -> NoReturn:
    forked = _serve(control, listener)
    if forked is None:
        os._exit(0)
    _become(*forked)
    _run()
    sys.exit()


if __name__ == "__main__":
    _main(*(socket.socket(fileno=int(word)) for word in sys.argv[1:]))
