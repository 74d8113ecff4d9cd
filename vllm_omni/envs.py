"""The environment variables of this project: each with its type, default and meaning.

``envs.VLLM_OMNI_X`` reads the environment at each access, so a test or a launcher may set it late. A value that does
not parse raises ``ConfigError``; so does ``reject_unknown`` for a ``VLLM_OMNI_*`` that is not declared here, because a
misspelt variable would otherwise be ignored.
"""

import math
import os
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from vllm_omni.cgroups import usable_memory
from vllm_omni.errors import ConfigError
from vllm_omni.names import suggest

PREFIX = "VLLM_OMNI_"

if TYPE_CHECKING:
    VLLM_OMNI_STAGE_READY_TIMEOUT_S: float
    VLLM_OMNI_STAGE_RESTARTS: int
    VLLM_OMNI_STAGE_RESTART_WINDOW_S: float
    VLLM_OMNI_STAGE_SHUTDOWN_TIMEOUT_S: float
    VLLM_OMNI_STAGE_STUCK_S: float
    VLLM_OMNI_READER_TIMEOUT_S: float
    VLLM_OMNI_FORK_SERVER: bool
    VLLM_OMNI_RUNTIME_DIR: Path
    VLLM_OMNI_RELAY_BYTES: int
    VLLM_OMNI_RELAY_HOST: str
    VLLM_OMNI_JOIN_TIMEOUT_S: float
    VLLM_OMNI_ORPHAN_S: float
    VLLM_OMNI_MAX_MEDIA_BYTES: int
    VLLM_OMNI_MAX_WAITING_MEDIA: int
    VLLM_OMNI_MEDIA_CACHE_BYTES: int
    VLLM_OMNI_MEDIA_FETCH_TIMEOUT_S: float
    VLLM_OMNI_MAX_VIDEO_SECONDS: float
    VLLM_OMNI_MAX_VIDEO_FRAMES: int
    VLLM_OMNI_MAX_VIDEO_PIXELS: int
    VLLM_OMNI_MAX_BODY_BYTES: int
    VLLM_OMNI_MAX_FETCHED_BYTES: int
    VLLM_OMNI_MAX_RECEIVED_BYTES: int
    VLLM_OMNI_VOICES_DIR: Path
    VLLM_OMNI_MAX_VOICES: int
    VLLM_OMNI_MAX_VOICE_BYTES: int
    VLLM_OMNI_MAX_VOICE_SECONDS: float
    VLLM_OMNI_FILES_DIR: Path
    VLLM_OMNI_MAX_FILE_BYTES: int
    VLLM_OMNI_FILE_TTL_S: float
    VLLM_OMNI_MAX_VIDEO_JOBS: int
    VLLM_OMNI_MAX_STREAMED_CHARACTERS: int
    VLLM_OMNI_SPEECH_STREAM_IDLE_S: float


class Variable(NamedTuple):
    parse: Callable[[str], object]  # raises ValueError, saying what is valid
    default: Callable[[], object]
    meaning: str


def _positive_seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise ValueError("a number of seconds above 0")
    return value


def _count(text: str) -> int:
    if not text.isascii() or not text.isdigit():
        raise ValueError("a whole number, 0 or more")
    return int(text)


def _flag(text: str) -> bool:
    if text not in ("0", "1"):
        raise ValueError("0 or 1")
    return text == "1"


def _positive_count(text: str) -> int:
    value = _count(text)
    if not value:
        raise ValueError("a whole number, 1 or more")
    return value


def _slab_bytes(text: str) -> int:
    value = _count(text)
    if value < 1 << 20 or value % 4096:
        raise ValueError("a number of bytes, 1048576 or more, in whole pages of 4096")
    return value


def _address(text: str) -> str:
    if not text or text in ("0.0.0.0", "::", "*"):
        raise ValueError("the name or address of one interface, which other hosts can reach")
    return text


def _existing_directory(text: str) -> Path:
    path = Path(text).expanduser()
    if not text or not path.is_dir():
        raise ValueError("the path of an existing directory")
    return path


def _path(text: str) -> Path:
    if not text:
        raise ValueError("the path of a directory")
    return Path(text).expanduser()


VARIABLES: Mapping[str, Variable] = {
    "VLLM_OMNI_STAGE_READY_TIMEOUT_S": Variable(
        _positive_seconds,
        lambda: 600.0,
        "how long a stage may take to load and answer, seconds; then the start fails and names the stage",
    ),
    "VLLM_OMNI_STAGE_RESTARTS": Variable(
        _count,
        lambda: 5,
        "how often a stage whose engine dies is restarted within VLLM_OMNI_STAGE_RESTART_WINDOW_S; 0: never",
    ),
    "VLLM_OMNI_STAGE_RESTART_WINDOW_S": Variable(
        _positive_seconds,
        lambda: 600.0,
        "seconds after which a restart no longer counts",
    ),
    "VLLM_OMNI_STAGE_SHUTDOWN_TIMEOUT_S": Variable(
        _positive_seconds,
        lambda: 5.0,
        "how long a stage may take to end when the server ends, seconds; then its processes are killed",
    ),
    "VLLM_OMNI_STAGE_STUCK_S": Variable(
        _positive_seconds,
        lambda: 60.0,
        "how long the processes of a stage with requests may make no step and use no CPU time, seconds, or ten times "
        "as long if they use some, as a compilation or a long step does; then they are killed, and the stage restarts",
    ),
    "VLLM_OMNI_READER_TIMEOUT_S": Variable(
        _positive_seconds,
        lambda: 300.0,
        "how long the stages of a request may wait for a client that reads nothing of its reply, seconds; then the "
        "request is aborted",
    ),
    "VLLM_OMNI_FORK_SERVER": Variable(
        _flag,
        lambda: sys.platform == "linux",
        "on a CPU, stages are forked from a process that has imported vLLM; 0: each imports it itself",
    ),
    "VLLM_OMNI_RUNTIME_DIR": Variable(
        _existing_directory,
        lambda: Path(tempfile.gettempdir()),
        "where a server creates its private directory of sockets; a short path: a socket's name has at most 107 bytes",
    ),
    "VLLM_OMNI_RELAY_BYTES": Variable(
        _slab_bytes,
        lambda: 256 << 20,
        "memory of each stage that publishes tensors, for each transport of its edges, bytes",
    ),
    "VLLM_OMNI_RELAY_HOST": Variable(
        _address,
        lambda: "127.0.0.1",
        "where the transports tcp, nixl, mooncake and a shared KV pool listen: an address that the other hosts reach; "
        "where hosts join, the address of --listen, or the one from which this host reaches it",
    ),
    "VLLM_OMNI_JOIN_TIMEOUT_S": Variable(
        _positive_seconds,
        lambda: 600.0,
        "how long a host waits for a front end that it joins and that is not up, seconds",
    ),
    "VLLM_OMNI_ORPHAN_S": Variable(
        _positive_seconds,
        lambda: 30.0,
        "how long a host tries to reach a front end that it has lost, seconds; then it ends its engines and itself",
    ),
    "VLLM_OMNI_MAX_MEDIA_BYTES": Variable(
        _positive_count,
        lambda: usable_memory() // 4,
        "memory to decode and process images, sounds and videos of prompts, up to 16 times their decoded bytes; others "
        "wait, and a prompt that needs more alone is rejected; by default a quarter of the machine's or container's",
    ),
    "VLLM_OMNI_MAX_WAITING_MEDIA": Variable(
        _positive_count,
        lambda: 1024,
        "prompts with media that may be fetched, wait or be read at a time; more are rejected (HTTP 503)",
    ),
    "VLLM_OMNI_MEDIA_CACHE_BYTES": Variable(
        _count,
        lambda: 0,
        "memory for decoded images, sounds and videos of prompts, beyond those: a file that is sent again, of the same "
        "bytes, is not decoded again; 0: none is kept",
    ),
    "VLLM_OMNI_MEDIA_FETCH_TIMEOUT_S": Variable(
        _positive_seconds,
        lambda: 30.0,
        "deadline to fetch one image, sound or video of a prompt, repetitions included",
    ),
    "VLLM_OMNI_MAX_VIDEO_SECONDS": Variable(
        _positive_seconds,
        lambda: 3600.0,
        "length of one video of a prompt, at most",
    ),
    "VLLM_OMNI_MAX_VIDEO_FRAMES": Variable(
        _positive_count,
        lambda: 216_000,
        "frames that one video of a prompt has, at most; a model reads some of them, and the others are decoded to "
        "reach those; by default an hour at 60 a second",
    ),
    "VLLM_OMNI_MAX_VIDEO_PIXELS": Variable(
        _positive_count,
        lambda: 250_000_000_000,
        "pixels of all of these frames, at most, which is the time of a thread that decodes them; by default somewhat "
        "more than an hour of 1920x1080 at 30 a second",
    ),
    "VLLM_OMNI_MAX_BODY_BYTES": Variable(
        _positive_count,
        lambda: 128 << 20,
        "bytes of the body of one request, at most (HTTP 413)",
    ),
    "VLLM_OMNI_MAX_FETCHED_BYTES": Variable(
        _positive_count,
        lambda: 512 << 20,
        "bytes of all files that one prompt names by http or https, at most",
    ),
    "VLLM_OMNI_MAX_RECEIVED_BYTES": Variable(
        _positive_count,
        lambda: usable_memory() // 8,
        "bytes of all bodies and files that are held as they were received; requests beyond are rejected (HTTP 429); "
        "by default an eighth of the machine's or container's memory",
    ),
    "VLLM_OMNI_VOICES_DIR": Variable(
        _path,
        lambda: Path(os.environ.get("XDG_DATA_HOME") or "~/.local/share").expanduser() / "vllm_omni" / "voices",
        "where uploaded voices are kept: a directory that is created, and that no other user can read",
    ),
    "VLLM_OMNI_MAX_VOICES": Variable(
        _count,
        lambda: 100,
        "uploaded voices, at most; 0: none can be uploaded",
    ),
    "VLLM_OMNI_MAX_VOICE_BYTES": Variable(
        _positive_count,
        lambda: 256 << 20,
        "bytes of the recordings of all uploaded voices, at most",
    ),
    "VLLM_OMNI_MAX_VOICE_SECONDS": Variable(
        _positive_seconds,
        lambda: 60.0,
        "length of one recording of a voice, uploaded or in a request, at most; each second takes 12.5 positions of a "
        "prompt",
    ),
    "VLLM_OMNI_FILES_DIR": Variable(
        _path,
        lambda: Path(os.environ.get("XDG_STATE_HOME") or "~/.local/state").expanduser() / "vllm_omni" / "files",
        "where videos that are made as jobs, and results by URL, are kept: a directory that is created, and that no "
        "other user can read; servers that share it share them",
    ),
    "VLLM_OMNI_MAX_FILE_BYTES": Variable(
        _positive_count,
        lambda: 10 << 30,
        "bytes of all of these files, at most",
    ),
    "VLLM_OMNI_FILE_TTL_S": Variable(
        _positive_seconds,
        lambda: 86400.0,
        "how long each of them is kept after it is complete, seconds",
    ),
    "VLLM_OMNI_MAX_VIDEO_JOBS": Variable(
        _positive_count,
        lambda: 64,
        "videos that one server makes as jobs and that are not complete, at most; more are rejected (HTTP 429)",
    ),
    "VLLM_OMNI_MAX_STREAMED_CHARACTERS": Variable(
        _positive_count,
        lambda: 100_000,
        "characters of a text that a client of /v1/audio/speech/stream sends in pieces, at most",
    ),
    "VLLM_OMNI_SPEECH_STREAM_IDLE_S": Variable(
        _positive_seconds,
        lambda: 60.0,
        "how long such a client may send nothing before the end of its text, seconds",
    ),
}


def __getattr__(name: str) -> object:
    variable = VARIABLES.get(name)
    if variable is None:
        raise AttributeError(f"module {__name__!r} declares no variable {name!r}: {suggest(name, VARIABLES)}")
    text = os.environ.get(name)
    if text is None:
        return variable.default()
    try:
        return variable.parse(text)
    except ValueError as exc:
        raise ConfigError(f"environment variable {name}={text!r}: must be {exc} ({variable.meaning})") from None


def reject_unknown(environ: Mapping[str, str] | None = None) -> None:
    """Raise ``ConfigError`` for a ``VLLM_OMNI_*`` of ``environ`` (default: this process's) not declared here."""
    for name in sorted(os.environ if environ is None else environ):
        if name.startswith(PREFIX) and name not in VARIABLES:
            raise ConfigError(f"environment variable {name} is not one of this project's: {suggest(name, VARIABLES)}")
