"""Engines that several test files use: one of each configuration for each pytest worker.

A test asks for an engine by its kind: ``engines.get(QWEN)``. The first test that does so starts it; it is stopped when
the worker turns to another group of tests (``tests/engine_groups.py``). After each test, every engine that it used must
hold no request; an engine that does, or whose test failed, is stopped, and the next test gets a new one.

| kind | engine | test files |
|---|---|---|
| QWEN | Qwen2.5-Omni, whose stages divide the memory, with statistics and profilers | omni_llm, async_omni, parity |
| QWEN_IMAGE | Qwen-Image in the engine core's process, with the row cache | diffusion, omni_llm_diffusion |
| STABLE_AUDIO | Stable Audio in a worker process | diffusion, media_routes |
| QWEN_SERVER | ``vllm serve`` with Qwen2.5-Omni | server, oversized_media, speech, documented_requests, stage_death |
| IMAGE_SERVER | ``vllm serve`` with Qwen-Image | images |

Tests that stop processes or need another configuration start engines of their own.
"""

import dataclasses
import functools
import inspect
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

if TYPE_CHECKING:  # conftest.py imports this file
    from tests.server import Server
    from vllm_omni import OmniLLM

QWEN_MAX_MODEL_LEN = 2048
BLOCK_SIZE = 32
IDLE_TIMEOUT_S = 60.0  # an aborted request leaves its stages with their next step
PROFILER = "{{profiler: torch, torch_profiler_dir: {directory}, ignore_frontend: true}}"


class Kind(NamedTuple):
    """A configuration of an engine, or of a server with engines."""

    name: str
    start: Callable[[Path], AbstractContextManager[Any]]  # given an empty directory, for its checkpoint and files
    is_idle: Callable[[Any], bool]  # whether it holds no request


def _start_qwen(directory: Path) -> "OmniLLM":
    """From ready stages, the vocoder's with a ready ``VllmConfig``: the way in that a model's name does not take."""
    from transformers import Qwen2_5OmniConfig

    from vllm_omni import OmniLLM
    from vllm_omni.config import load_config
    from vllm_omni.engine.stage import StageEngine
    from vllm_omni.model_executor.models.qwen2_5_omni.pipeline import Qwen2_5OmniPipeline
    from vllm_omni.plugin import register
    from vllm_omni.testing import qwen2_5_omni as tiny

    register()
    path = tiny.build(directory / "checkpoint")
    profiler = PROFILER.format(directory=directory / "traces")
    config = load_config(
        path,
        dtype="float32",
        enforce_eager=True,
        max_model_len=QWEN_MAX_MODEL_LEN,
        block_size=BLOCK_SIZE,
        skip_mm_profiling=True,
        stage_overrides=[f"{name}.profiler_config={profiler}" for name in ("thinker", "talker", "token2wav")],
    )
    vocoder = config.stage("token2wav")
    pipeline = Qwen2_5OmniPipeline(str(path), Qwen2_5OmniConfig.from_pretrained(path))
    ready = StageEngine(vocoder, pipeline.stages[vocoder.stage_id]).vllm_config
    stages = [*config.stages[:-1], dataclasses.replace(vocoder, engine_args={}, vllm_config=ready)]
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("VLLM_CPU_KVCACHE_SPACE")  # the stages divide the machine's memory
        return OmniLLM(stage_configs=stages, log_stats=True)


def _start_pipeline(directory: Path, name: str, *stage_overrides: str) -> "OmniLLM":
    from vllm_omni import OmniLLM
    from vllm_omni.testing import diffusion as tiny

    return OmniLLM(tiny.build(directory / "checkpoint", name), stage_overrides=stage_overrides)


def _start_qwen_image(directory: Path) -> "OmniLLM":
    """No request reaches the threshold of the row cache: requests may bring another."""
    return _start_pipeline(
        directory,
        "qwen-image",
        "diffusion.diffusion.max_pixels=65536",
        "diffusion.diffusion.cache_threshold=1e-9",
        "diffusion.default_sampling_params.num_inference_steps=2",
    )


def _start_stable_audio(directory: Path) -> "OmniLLM":
    return _start_pipeline(directory, "stable-audio", "diffusion.executor_class=mp")


@contextmanager
def _serve_qwen(directory: Path) -> "Iterator[Server]":
    """It sends its traces to ``Server.collector``."""
    from tests.collector import collector
    from tests.server import MAX_MODEL_LEN, serve
    from vllm_omni.testing import qwen2_5_omni as tiny

    flags = ["--dtype=float32", "--enforce-eager", f"--max-model-len={MAX_MODEL_LEN}", "--skip-mm-profiling"]
    flags += ["--stage=thinker.max_num_seqs=16", '--stage-overrides={"voices": {"onyx": "Ethan"}}']
    flags += ["--trust-request-mm-kwargs"]
    checkpoint = tiny.build(directory / "checkpoint")
    variables: dict[str, str | None] = {
        "VLLM_LOGGING_LEVEL": None,
        "VLLM_OMNI_STAGE_RESTARTS": "1",  # test_stage_death.py
        "VLLM_OMNI_STAGE_STUCK_S": "10",  # likewise
        "VLLM_MEDIA_FETCH_MAX_RETRIES": "1",  # not three, with seconds between them
        "TORCHDYNAMO_DISABLE": "1",  # vLLM compiles how it ranks logprobs, which takes seconds and g++
    }
    variables["OTEL_BSP_SCHEDULE_DELAY"] = "100"  # ms, not 5 s
    with collector() as service:
        flags.append(f"--otlp-traces-endpoint={service.url}")
        with serve(checkpoint, directory / "log", *flags, **variables) as server:
            server.collector = service
            yield server


def _serve_images(directory: Path) -> "AbstractContextManager[Server]":
    from tests.server import serve
    from vllm_omni.testing import diffusion as tiny

    checkpoint = tiny.build(directory / "checkpoint", "qwen-image")
    return serve(checkpoint, directory / "log", "--stage=diffusion.diffusion.max_outputs=4")


def is_idle(llm: "OmniLLM") -> bool:
    """Whether the graph's runtime holds no call, no activation and no frame, and admits requests."""
    statistics = llm.engine.orchestrator.runtime.statistics()
    counts = (statistics.num_open_calls, statistics.num_running_activations, statistics.num_buffered_frames)
    return not any(counts) and not llm.run(llm.engine.is_paused())


def has_ended_or_is_idle(server: "Server") -> bool:
    return server.process.poll() is not None or server.holds_nothing()


QWEN = Kind("qwen2.5-omni", _start_qwen, is_idle)
QWEN_IMAGE = Kind("qwen-image", _start_qwen_image, is_idle)
STABLE_AUDIO = Kind("stable-audio", _start_stable_audio, is_idle)
QWEN_SERVER = Kind("qwen2.5-omni-server", _serve_qwen, has_ended_or_is_idle)
IMAGE_SERVER = Kind("qwen-image-server", _serve_images, has_ended_or_is_idle)


class SharedEngines:
    """The engines of one pytest worker."""

    def __init__(self, factory: pytest.TempPathFactory) -> None:
        self._factory = factory
        self._running: dict[Kind, _Running] = {}
        self._failures: dict[Kind, Exception] = {}  # of engines that did not start
        self._used: set[Kind] = set()  # by the running test

    def get(self, kind: Kind) -> Any:
        """The running engine of this kind, started if there is none."""
        return self._get(kind).engine

    def directory(self, kind: Kind) -> Path:
        """The directory of the running engine: ``checkpoint``, and what else its configuration names."""
        return self._get(kind).directory

    def _get(self, kind: Kind) -> "_Running":
        self._used.add(kind)
        if kind not in self._running:
            if kind in self._failures:
                pytest.fail(f"{kind.name} did not start for an earlier test: {self._failures[kind]}", pytrace=False)
            directory = self._factory.mktemp(kind.name)
            stack = ExitStack()
            try:
                self._running[kind] = _Running(stack.enter_context(kind.start(directory)), directory, stack)
            except Exception as exc:
                self._failures[kind] = exc
                raise
        return self._running[kind]

    def check(self) -> None:
        """Assert that the engines of the running test hold no request."""
        deadline = time.monotonic() + IDLE_TIMEOUT_S
        for kind in self._used & self._running.keys():
            while not kind.is_idle(self._running[kind].engine):
                assert time.monotonic() < deadline, f"{kind.name} still holds a request of the test, or is paused"
                time.sleep(0.02)

    def end_test(self, *, has_failed: bool) -> None:
        """Stop the engines of a test that has failed."""
        if has_failed:
            self.stop(*self._used)
        self._used.clear()

    def stop(self, *kinds: Kind) -> None:
        """Stop these engines, or all."""
        for kind in kinds or tuple(self._running):
            if kind in self._running:
                self._running.pop(kind).stack.close()


class _Running(NamedTuple):
    engine: Any
    directory: Path
    stack: ExitStack  # stops it


def on_the_loop_of(argument: str) -> Callable[[Callable[..., Coroutine[Any, Any, None]]], Callable[..., None]]:
    """Run a coroutine test on the event loop of a shared engine, whose clients belong to that loop.

    Args:
        argument: a fixture that gives an ``OmniLLM``, of which the test gets the ``AsyncOmni``; or one that gives an
            object with the field ``llm``, which the test gets as it is.
    """

    def decorate(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
        assert argument in inspect.signature(test).parameters

        @functools.wraps(test)
        def run(**fixtures: Any) -> None:
            given = fixtures[argument]
            if hasattr(given, "llm"):
                given.llm.run(test(**fixtures))
            else:
                given.run(test(**{**fixtures, argument: given.engine}))

        return run

    return decorate
