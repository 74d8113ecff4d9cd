"""``vllm serve MODEL --omni``: a real process, asked by the real ``openai`` client."""

import base64
import io
import os
import random
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import numpy as np
import openai
import psutil
import soundfile

from tests import zygote

if TYPE_CHECKING:
    from tests.collector import Collector

START_TIMEOUT_S = 300.0
END_TIMEOUT_S = 30.0
SAMPLES_PER_CODE = 480
NUM_CODES = 12
MAX_MODEL_LEN = 1024
QUESTION = [{"role": "user", "content": "Hello, who are you?"}]
# The tiny checkpoint never ends by itself, so that the numbers of tokens and codes are those asked for.
STAGES = {"talker": {"temperature": 0.0, "max_tokens": NUM_CODES}, "token2wav": {"seed": 0}}
SHORT = {"model": "tiny", "messages": QUESTION, "temperature": 0.0, "max_tokens": 6}


@dataclass
class Server:
    url: str
    process: subprocess.Popen[bytes]
    log: Path
    collector: "Collector | None" = None  # of its traces

    @cached_property
    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=self.url + "/v1", api_key="none", max_retries=0, timeout=60)

    @cached_property
    def text(self) -> str:
        """The answer of a chat model to ``QUESTION``."""
        content: str = ask(self.client).choices[0].message.content
        assert content
        return content

    def get(self, path: str) -> httpx.Response:
        return httpx.get(self.url + path, timeout=30)

    def post(self, path: str, body: Any) -> httpx.Response:
        return httpx.post(self.url + path, json=body, timeout=60)

    def metric(self, name: str) -> float:
        """The value of one line of /metrics, given as a regular expression."""
        (value,) = re.findall(rf"^{name} (\S+)$", self.get("/metrics").text, flags=re.MULTILINE)
        return float(value)

    def num_tokens(self, stage: str) -> float:
        """Tokens that a stage has generated since the server's start."""
        return self.metric(rf'vllm:generation_tokens_total\{{[^}}]*stage="{stage}"[^}}]*\}}')

    def holds_nothing(self) -> bool:
        """Whether no request is in any stage."""
        metrics = self.get("/metrics").text
        names = ("num_open_calls", "num_running_activations", "num_buffered_frames")
        return all(f"\nvllm_omni:{name} 0.0\n" in metrics for name in names)


def wait_for(what: str, is_true: Callable[[], bool], timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not is_true():
        assert time.monotonic() < deadline, f"not within {timeout_s:g} s: {what}"
        time.sleep(0.05)


def free_port() -> int:
    """A port to listen on, below those that the system gives to connections: one of these may have been given to
    another test's connection by the time that a server binds it.
    """
    first_given = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    while True:
        port = random.SystemRandom().randrange(10_000, first_given)  # not what a test seeds
        with socket.socket() as sock, suppress(OSError):
            sock.bind(("127.0.0.1", port))
            return port


@contextmanager
def serve(model: Path, log: Path, *flags: str, **variables: str | None) -> Iterator[Server]:
    """A server of a model under the name "tiny"; at the end it stops, and every process of its stages with it.

    Args:
        variables: of its environment, over those of this process; None: it has no such variable.
    """
    port = free_port()
    command = [Path(sys.executable).with_name("vllm"), "serve", model, "--omni", *flags]
    command += ["--served-model-name=tiny", "--host=127.0.0.1", f"--port={port}"]
    forks = {"VLLM_OMNI_FORK_SERVER": "1"}  # tests/engine_threads.py may have changed that here
    environ = {name: value for name, value in (os.environ | forks | variables).items() if value is not None}
    with log.open("wb") as output:
        process = zygote.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environ)
    server = Server(f"http://127.0.0.1:{port}", process, log)
    try:
        wait_for(f"the server's start; its log: {log}", lambda: is_up(server), START_TIMEOUT_S)
        yield server
    finally:
        server.client.close()
        stages = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
        process.send_signal(signal.SIGTERM)
        process.wait(END_TIMEOUT_S)
        assert not psutil.wait_procs(stages, END_TIMEOUT_S)[1], "a stage outlived its server"


def install_pipeline(directory: Path, name: str, place: str) -> tuple[str, str]:
    """Let a server find a pipeline as one of another package; returns its flag, and its ``PYTHONPATH``.

    Args:
        name: of the model type.
        place: of the class, "package.module:Class".
    """
    installed = directory / f"{name}-1.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n")
    (installed / "entry_points.txt").write_text(f"[vllm_omni.pipelines]\n{name} = {place}\n")
    deployment = directory / f"{name}.yaml"
    deployment.write_text(f"model_type: {name}\n")
    paths = [str(directory), str(Path(__file__).resolve().parents[1]), os.environ.get("PYTHONPATH", "")]
    return f"--deploy-config={deployment}", os.pathsep.join(paths)


def is_up(server: Server) -> bool:
    if (status := server.process.poll()) is not None:
        end = server.log.read_text(errors="replace")[-3000:]
        raise AssertionError(f"the server ended with {status} while it started: {end}")
    try:
        return server.get("/health").status_code == 200
    except httpx.TransportError:
        return False


@contextmanager
def silent_host() -> Iterator[str]:
    """The address of a host that accepts connections, and never sends anything."""
    with socket.create_server(("127.0.0.1", 0), backlog=64) as host:
        yield f"http://127.0.0.1:{host.getsockname()[1]}"


def engine_core(server: Server, stage: str) -> psutil.Process:
    """Each process of a stage has left a file with its name in the server's directory."""
    for child in psutil.Process(server.process.pid).children(recursive=True):  # of the fork server, if there is one
        if any(Path(tempfile.gettempdir()).glob(f"vllm-omni-*/{stage}.{child.pid}.process")):
            return child
    raise AssertionError(f"no engine core of {stage}")


def ask(client: openai.OpenAI, **more: Any) -> Any:
    return client.chat.completions.create(**{**SHORT, "extra_body": {"sampling_params_list": STAGES}, **more})


def read_audio(data: str, num_codes: int = NUM_CODES) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Samples of a file in base 64, which must be a sound."""
    samples, sample_rate = soundfile.read(io.BytesIO(base64.b64decode(data)))
    assert sample_rate == 24000
    assert samples.shape == (num_codes * SAMPLES_PER_CODE,)
    assert np.isfinite(samples).all()
    assert 0.001 < np.abs(samples).max() <= 1.0
    return samples


def run_example(name: str, server: Server, *arguments: str | Path) -> list[str]:
    """Run an example of a client as a user does; what it printed."""
    example = Path(__file__).resolve().parents[1] / "examples" / name
    command = [sys.executable, example, "--base-url", server.url + "/v1", *arguments]
    result = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert result.returncode == 0, result.stderr
    return result.stdout.splitlines()
