"""``StageEngine``: one vLLM engine as a node of the graph."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import AsyncIterator
from typing import Any

from pydantic import ValidationError
from vllm.config import VllmConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.exceptions import VLLMClientError
from vllm.platforms import current_platform
from vllm.renderers.inputs.preprocess import parse_model_prompt
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.usage.usage_lib import UsageContext
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError
from vllm.v1.engine.output_processor import OutputProcessor
from vllm.v1.executor.abstract import Executor

from vllm_omni.config import StageConfig
from vllm_omni.engine.output_processor import MultimodalOutputProcessor
from vllm_omni.engine.refusal import refusal
from vllm_omni.engine.run_directory import Lease
from vllm_omni.errors import ConfigError, InvalidRequest, StageFailed
from vllm_omni.flow import Activation, Emission
from vllm_omni.model_executor.pipeline import RequestContext, StageRequest, StageSpec
from vllm_omni.model_executor.stage_model import STAGE_ARGS
from vllm_omni.outputs import OmniRequestOutput
from vllm_omni.worker.platforms import ar_worker_cls

logger = logging.getLogger(__name__)

# After that a process is killed, and its semaphores stay until the program ends. Upstream's five seconds are too short
# for several engines on a few cores: a Python with torch and vLLM in it takes seconds of computing to end.
SHUTDOWN_TIMEOUT_S = 20.0

CPU_KV_CACHE_BYTES = 2**30
"""Of an autoregressive stage on a CPU, unless the deployment or VLLM_CPU_KVCACHE_SPACE says otherwise."""
_KV_CACHE_ARGS = {"kv_cache_memory_bytes", "gpu_memory_utilization", "num_gpu_blocks_override"}


class StageLLM(AsyncLLM):
    """vLLM's ``AsyncLLM`` whose outputs carry tensors beside tokens."""

    def __init__(self, vllm_config: VllmConfig, output_type: str, log_stats: bool) -> None:
        super().__init__(
            vllm_config,
            Executor.get_class(vllm_config),
            log_stats=log_stats,
            usage_context=UsageContext.ENGINE_CONTEXT,
            log_requests=False,
        )
        # Upstream hands its processor to the output loop when that starts, which inside an event loop is at once.
        assert self.output_handler is None, "a stage is started from a thread that has no event loop"
        self.output_processor: OutputProcessor = MultimodalOutputProcessor(self.output_processor, output_type)

    def __del__(self) -> None:
        """Upstream shuts down here, which fails at interpreter exit; ``StageEngine.shutdown`` is explicit."""


class StageEngine:
    """One engine: starts it, runs activations on it, tells its health.

    ``start`` blocks for seconds and belongs in a thread; everything else belongs to one event loop.
    """

    def __init__(self, config: StageConfig, spec: StageSpec, *, log_stats: bool = False) -> None:
        self.config = config
        self.spec = spec
        self.name = config.name
        self.log_stats = log_stats
        self.vllm_config = config.vllm_config or self._create_vllm_config()

    def start(self, lease: Lease) -> None:
        """Start the engine's processes and load the model. Blocks until the engine is ready.

        Raises:
            StageFailed: the engine did not start; the cause is attached.
        """
        self._lease = lease
        lease.update(self.vllm_config.additional_config)
        self.vllm_config.additional_config = lease
        logger.info("stage %s: starting", self.name)
        started = time.monotonic()
        try:
            self.llm = StageLLM(self.vllm_config, self.spec.output_type, self.log_stats)
        except Exception as exc:
            raise StageFailed(self.name, f"did not start: {lease.failure() or exc}") from exc
        logger.info("stage %s: ready after %.1f s", self.name, time.monotonic() - started)

    async def aclose(self) -> None:
        """Stop reading the engine's outputs, so that its end is not taken for a death. Call it before ``shutdown``."""
        handler, self.llm.output_handler = self.llm.output_handler, None
        if handler is not None:
            handler.cancel()
            await asyncio.gather(handler, return_exceptions=True)

    def shutdown(self) -> None:
        """End the engine's processes; does nothing when it was not started."""
        if "llm" in self.__dict__:
            self.llm.shutdown(timeout=SHUTDOWN_TIMEOUT_S)

    async def check_health(self) -> None:
        """Raises:
        StageFailed: the engine is dead.
        """
        if self.llm.errored:
            raise self._died()

    def _died(self) -> StageFailed:
        cause = self._lease.failure()
        return StageFailed(self.name, f"its engine has died: {cause}" if cause else "its engine has died")

    # -- node of the graph --------------------------------------------------------------------------------------------

    async def forward(self, activation: Activation) -> AsyncIterator[Emission]:
        """Run one activation: each chunk of its input is a request, in order; outputs go to every wanted field.

        An input without a chunk (a branch that has nothing to say) yields nothing. Cancelling aborts the request.

        Raises:
            InvalidRequest: the engine refused the request.
            StageFailed: the engine died, or the model failed on this request.
        """
        context: RequestContext = activation.context
        (chunks,) = activation.inputs.values()
        duration_s = 0.0  # without the time in which it waited for the next chunk
        async for chunk in chunks:
            if chunk.payload is None:
                continue
            started = time.monotonic()
            async for output in self.generate(chunk.payload, context, activation.wanted, chunk.seq):
                self._raise_error(output)
                is_last = output.finished and chunk.last
                if is_last:
                    context.stage_durations[self.name] = duration_s + time.monotonic() - started
                for field in activation.wanted:
                    yield Emission(field, output, last=is_last)
            duration_s += time.monotonic() - started

    async def generate(
        self, request: StageRequest, context: RequestContext, wanted: frozenset[str], seq: int = 0
    ) -> AsyncIterator[OmniRequestOutput]:
        """Stream one request through the engine, as deltas; ``seq`` tells it from the others of its activation."""
        params = self._sampling_params(request, context, wanted)
        is_first = self.config.stage_id == 0
        prompt = await self._render(request.prompt) if is_first else request.prompt
        try:
            async for output in self.llm.generate(
                prompt,
                params,
                f"{context.request_id}-{self.name}" + (f"-{seq}" if seq else ""),
                lora_request=context.lora_request if is_first else None,
                priority=context.priority,
                trace_headers=context.trace_headers,
                **(context.engine_kwargs if is_first else {}),
            ):
                assert isinstance(output, OmniRequestOutput)
                yield output
        except VLLMClientError as exc:
            raise refusal(exc, self.name) from exc
        except EngineGenerateError as exc:
            raise StageFailed(self.name, f"failed the request: {exc.__cause__ or exc!r}") from exc
        except EngineDeadError as exc:
            raise self._died() from exc

    async def _render(self, prompt: Any) -> Any:
        """The user's prompt as the engine reads it. What goes wrong here is the prompt's fault: ``InvalidRequest``."""
        if not (isinstance(prompt, dict) and "type" in prompt):  # else it is rendered already
            try:
                parsed = parse_model_prompt(self.llm.model_config, prompt)
                (prompt,) = await self.llm.renderer.render_cmpl_async([parsed])
            except Exception as exc:
                raise refusal(exc, self.name) from exc
        # A number of another type would end the thread by which the engine hears of requests.
        wrong = [token for token in prompt.get("prompt_token_ids") or () if type(token) is not int]
        if wrong:
            raise InvalidRequest(f"prompt_token_ids: {wrong[0]!r} is no int")
        if self.spec.check_prompt is not None:
            self.spec.check_prompt(prompt)
        return prompt

    def _sampling_params(
        self, request: StageRequest, context: RequestContext, wanted: frozenset[str]
    ) -> SamplingParams:
        params = context.params[self.name].clone()
        publishes = bool(self.spec.publishing_fields & wanted)
        if publishes and params.n > 1:
            raise InvalidRequest(f"stage {self.name!r}: n = {params.n}: the next stage reads one answer; give n = 1")
        if publishes or params.output_kind is not RequestOutputKind.FINAL_ONLY:
            params.output_kind = RequestOutputKind.DELTA
        for name, value in self.spec.sampling_params.items():
            setattr(params, name, value)
        params.all_stop_token_ids.update(params.stop_token_ids or ())  # what min_tokens must not let through
        args = dict(request.args)
        if publishes:
            args["publish"] = True
            # A cached prefix is not computed, so it would have no rows to publish.
            params.skip_reading_prefix_cache = True
        # Whatever the user put there under our key must not reach the runner.
        extra_args = {name: value for name, value in (params.extra_args or {}).items() if name != STAGE_ARGS}
        params.extra_args = {**extra_args, STAGE_ARGS: args} if args else extra_args or None
        return params

    def _raise_error(self, output: OmniRequestOutput) -> None:
        if any(completion.finish_reason == "error" for completion in output.outputs):
            raise StageFailed(self.name, "its engine gave the request up (finish_reason 'error')")
        error = output.multimodal_output.get("error")
        if error is None:
            return
        if output.multimodal_output.get("invalid"):
            raise InvalidRequest(f"stage {self.name!r}: {error}")
        raise StageFailed(self.name, error)

    # -- configuration ------------------------------------------------------------------------------------------------

    def _create_vllm_config(self) -> VllmConfig:
        args: dict[str, Any] = {"model": self.config.model, "disable_log_stats": not self.log_stats}
        args["use_tqdm_on_load"] = False  # the bars of several stages would overwrite one another
        args |= self._stage_defaults() | dict(self.config.engine_args)
        for name in ("hf_overrides", "worker_cls", "scheduler_cls"):
            if self.config.engine_args.get(name):
                raise ConfigError(f"stage {self.name!r}: {name}: set by the model's pipeline, and cannot be changed")
        for name, value in self.spec.engine_args.items():
            if self.config.engine_args.get(name, value) != value:
                given = self.config.engine_args[name]
                raise ConfigError(f"stage {self.name!r}: {name} = {given!r}: this model runs with {value!r} only")
            args[name] = value
        args["hf_overrides"] = self.spec.hf_overrides or {"architectures": [self.spec.architecture]}
        if self.config.executor_class is not None:
            args["distributed_executor_backend"] = self.config.executor_class
        # Our runner extends V1's; the switch is read here and in every process of the stage.
        os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"
        # A forked child inherits locks of threads that it does not have, and stages start from threads.
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
        try:
            return AsyncEngineArgs(**args).create_engine_config(UsageContext.ENGINE_CONTEXT)
        except ValidationError as exc:
            said = "; ".join(error["msg"].removeprefix("Value error, ") for error in exc.errors(include_url=False))
            raise ConfigError(f"stage {self.name!r}: {said}") from exc
        except (ValueError, TypeError, NotImplementedError, VLLMClientError) as exc:
            raise ConfigError(f"stage {self.name!r}: {exc}") from exc

    def _stage_defaults(self) -> dict[str, Any]:
        """What a stage of its type runs with unless the deployment says otherwise."""
        device = current_platform.device_type
        if self.config.engine_type != "ar":
            return {
                "dtype": "float32",
                "distributed_executor_backend": "vllm_omni.model_executor.oneshot_executor.OneShotExecutor",
                "scheduler_cls": "vllm_omni.core.sched.diffusion.DiffusionScheduler",
                "skip_tokenizer_init": True,
                "enable_prefix_caching": False,
                "enforce_eager": True,
                "max_num_seqs": 8,
                "max_model_len": 16,  # one prompt token and one output token
            }
        defaults: dict[str, Any] = {"async_scheduling": False, "worker_cls": ar_worker_cls(device)}
        if device == "cpu" and self.config.engine_args.get("tensor_parallel_size", 1) == 1:
            # In the engine core's own process: on the CPU vLLM would otherwise add a worker and two hops a step.
            defaults["distributed_executor_backend"] = "vllm.v1.executor.uniproc_executor.UniProcExecutor"
        is_kv_cache_sized = os.environ.get("VLLM_CPU_KVCACHE_SPACE") or _KV_CACHE_ARGS & set(self.config.engine_args)
        if device == "cpu" and not is_kv_cache_sized:
            # vLLM would give each stage most of the machine's memory.
            defaults["kv_cache_memory_bytes"] = CPU_KV_CACHE_BYTES
        return defaults
