"""Everything of vLLM that is replaced at run time; all other code subclasses, registers or configures.

==============================  ============================================  =======================================
Function, and what it replaces  Why                                           Upstream hook that would end it
==============================  ============================================  =======================================
``torch_kernels_for_encoders``  An encoder that runs in a thread must not     a hook of the loader before it packs
 base_loader's function that    share scratch memory with the language model  weights for CPU kernels
 packs weights, during a load
``unpacked_cpu_weights``        Weights that several engines map must not     an option that keeps linear weights
 the function that packs        be copied, packed, into each of them          as they are loaded
 linear weights, during a load
``replace_media_connector``     Media wait, as files, until they fit into a   a class per server (VLLM_MEDIA_CONNECTOR
 the registry's connector       budget of memory; a fetch has one deadline    names one for the process)
``wrap_renderer``               Prompts with media are counted and hold a     a limit in the renderer
 a renderer's two methods       budget, for the engine and HTTP handlers
``decline_chats``               A model without a chat template starts        a warm-up of the template for models
 a renderer's method            without a traceback in the log                that have one
``limit_media_threads``         More threads than cores, decoding media,      a pool given to ``MediaConnector``; the
 the size of vLLM's media pool  delay the event loop                          environment variable is read at import
``check_before_decoding``       A file to transcribe is checked as those of   a media connector in the handlers of
 a method of vLLM's handlers    chats are, before FFmpeg opens it             transcriptions
 of transcriptions
``replace_sender_cache``        Media count as sent when they have been       a cache that is notified of what has
 a renderer's media cache       sent, not when they have been processed       been sent
``keep_media_in_front_end``     Instances share a front end: it cannot        a cache type for the front end alone
 a renderer's media cache       assume that an engine has an image
``name_media_by_content``       Names from a counter would be another         a setting that names media by content
 a renderer's method            image's in another engine, or after a         alone
                                restart, and so would those of users
``filter_logs``                 A stage's lines are named after it, and       filters in ``LoggingConfig``
 vLLM's default configuration   lines that concern us are left out
 of logging
``name_processes``              ``ps`` shows which stage a process belongs    a name in ``VllmConfig``
 a default of the function      to
 that sets processes' titles
``extend_request_state``        A request's outputs carry payloads            a class attribute of ``OutputProcessor``
 the class of a RequestState                                                  that names the class of its states
``hash_blocks_by``              Blocks of a prompt of rows are named by the   a hook for further keys of a block's
 the function of a request      rows that another stage has computed          hash, in the scheduler
 that hashes its blocks
``uncompiled_logprob_ranks``    The first request with log probabilities      a warm-up of the sampler with them
 one function of the sampler    would be compiled for, with g++, while all
                                others wait
``uncompiled_vocabulary_masks`` Each rank would compile a few sums of its     the same for the embedding of a part of
 one function of embeddings     ids, or search for a compiler, when it        the vocabulary
                                starts: seconds
``replace_zero_experts``        LongCat-Flash runs on a CPU, where vLLM has    a router for the CPU with experts
 two functions of a router      no kernels for experts that compute nothing   that compute nothing
``quiet_groups_of_one_rank``    A gloo group has threads that wake 100 times  process groups of one rank without a
 torch.distributed's functions  a second each; vLLM makes twelve for a rank   backend
 that make groups               that has no other rank
``start_engine_cores_in``       A stage is forked from a process that has     a start method "forkserver" in
 the function of a module that  imported vLLM, instead of importing it again  VLLM_WORKER_MULTIPROC_METHOD
 chooses the start method
``start_workers_in``            The ranks of an engine are forked likewise    the same
 the same of another module
``inspect_models_here``         On a CPU no device must be kept out of the    a check of the platform
 the registry's function that   front end, and a process imports for six
 calls another in a process     seconds for each class it has not seen
``register_kernels_once``       What is forked has the kernels of its CPU     a check of the function's for what it
 a method of the platform       already: finding them again takes 0.4 s       has registered
``configure_logging_at_once``   Each of a thousand loggers would clear what   a configuration of the loggers that have
 the function that configures   all of them have cached: 0.3 s of a start     settings alone
 loggers
``wait_without_spinning``       For a second after each message, ranks and    an argument of ``MessageQueue``
 a default of a condition       their engine core would keep cores busy that
                                compute on a CPU
``end_without_collecting``      A process that ends need not search, and so   a shutdown that knows whether its
 a function of Python's gc      copy, the objects that it shares              process ends
``adopt``                       A subclass takes over an object that vLLM     a copy constructor of ``RequestOutput``
 a constructor                  has made                                      and the handlers of OpenAI's routes
==============================  ============================================  =======================================
"""

from __future__ import annotations

import gc
import logging
import os
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.context import BaseContext
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from vllm_omni.errors import ConfigError

if TYPE_CHECKING:
    from torch import nn
    from vllm.config import ModelConfig
    from vllm.multimodal.cache import LruKeyReplicatedSenderCache
    from vllm.renderers.base import BaseRenderer
    from vllm.v1.core.kv_cache_utils import BlockHash
    from vllm.v1.request import Request

SPIN_S = 0.001  # a message that comes later costs 0.1 ms more
LOOK_MS = 20  # for a message without a notification

S = TypeVar("S", bound="LruKeyReplicatedSenderCache")
T = TypeVar("T")


@contextmanager
def torch_kernels_for_encoders() -> Iterator[None]:
    """Make models that load inside the block compute linear layers outside the language model with torch's kernels.

    vLLM's CPU kernels share scratch memory between threads. Weights are packed for them at the end of loading, without
    a hook before it. Should vLLM's loaders call another function, ``CPUARModelRunner.check_encode_in_thread`` fails.
    """
    from vllm.model_executor.model_loader import base_loader

    upstream = base_loader.process_weights_after_loading

    def process(model: nn.Module, *args: Any, **kwargs: Any) -> None:
        language = {
            id(module) for name in model._language_model_names for module in model.get_submodule(name).modules()
        }
        for module in model.modules():
            if id(module) not in language:
                module._cpu_skip_gemm_dispatch = True
        upstream(model, *args, **kwargs)

    base_loader.process_weights_after_loading = process
    try:
        yield
    finally:
        base_loader.process_weights_after_loading = upstream


@contextmanager
def unpacked_cpu_weights() -> Iterator[None]:
    """Let models that load inside the block compute linear layers from their weights as they are, with torch's kernels.

    Raises:
        ConfigError: inside the block, where a layer that is not linear has its weights packed.
    """
    from torch.nn import functional
    from vllm.model_executor.layers import utils

    upstream = utils.dispatch_cpu_unquantized_gemm

    def dispatch(layer: Any, remove_weight: bool) -> None:
        if layer.weight.ndim == 2:
            layer.cpu_linear = functional.linear
            return
        before = layer.weight.data_ptr()
        upstream(layer, remove_weight)
        if layer.weight.data_ptr() != before:
            raise ConfigError(f"{type(layer).__name__}: its weights are packed for this CPU, and cannot be shared")

    utils.dispatch_cpu_unquantized_gemm = dispatch
    try:
        yield
    finally:
        utils.dispatch_cpu_unquantized_gemm = upstream


def wrap_renderer(renderer: BaseRenderer, wrap: Callable[[Any, Any], tuple[Any, Any]]) -> None:
    """Replace a renderer's two asynchronous methods by what ``wrap`` makes of them.

    Args:
        wrap: (``render_cmpl_async``, ``render_chat_async``) -> their replacements, with the same signatures.
    """
    renderer.render_cmpl_async, renderer.render_chat_async = wrap(
        renderer.render_cmpl_async, renderer.render_chat_async
    )


def decline_chats(renderer: BaseRenderer) -> None:
    """Let a renderer say that its model has no chat template; the server then does not warm it up."""
    from vllm.renderers.chat_utils import ChatTemplateResolutionError

    def render_chat(*_: Any, **__: Any) -> NoReturn:
        raise ChatTemplateResolutionError("this model speaks a text: it has no chat template")

    renderer.render_chat = render_chat


def replace_media_connector(connector: type) -> None:
    """Make vLLM's default connector one of ours; another one that VLLM_MEDIA_CONNECTOR names stays."""
    from vllm.multimodal.media import MEDIA_CONNECTOR_REGISTRY

    MEDIA_CONNECTOR_REGISTRY.register("http")(connector)


def check_before_decoding(handler: Any, check: Callable[[bytes], object]) -> None:
    """Have vLLM's handler of transcriptions or translations check a file in its threads, where it then decodes it.

    Args:
        check: raises for a file that is not to be decoded.
    """
    from vllm.utils.async_utils import make_async_with_semaphore

    decode = handler._decode_and_chunk_speech

    def check_and_decode(data: bytes) -> Any:
        check(data)
        return decode(data)

    executor = handler._preprocess_executor
    handler._decode_and_chunk_speech_async = make_async_with_semaphore(check_and_decode, executor=executor)


def limit_media_threads() -> None:
    """Let vLLM decode media in at most one thread per core, unless VLLM_MEDIA_LOADING_THREAD_COUNT is set."""
    from vllm.multimodal.media.connector import global_thread_pool

    if not os.environ.get("VLLM_MEDIA_LOADING_THREAD_COUNT"):
        global_thread_pool._max_workers = min(global_thread_pool._max_workers, os.cpu_count() or 1)


def replace_sender_cache(renderer: BaseRenderer, cache_type: type[S]) -> S | None:
    """Give a renderer another record of the media that its engine has; None if it keeps none."""
    from vllm.multimodal.cache import LruKeyReplicatedSenderCache

    if not isinstance(renderer.mm_processor_cache, LruKeyReplicatedSenderCache):
        return None
    cache = cache_type(renderer.model_config)
    renderer._mm_processor_cache = cache
    return cache


def name_media_by_content(renderer: BaseRenderer, *, trusts_uuids: bool) -> None:
    """Let a renderer name media by a hash of their content, also where upstream uses a counter: with its caches off.

    Args:
        trusts_uuids: names that requests bring (``multi_modal_uuids``) stand for the content; False: they are ignored.
    """
    upstream = renderer._validate_mm_uuids

    def name(mm_data: Any, items: Any, uuids: Any, request_id: str) -> Any:
        upstream(mm_data, items, uuids)
        if trusts_uuids:
            return uuids
        for modality in mm_data:
            if modality not in items or any(item is None for item in items[modality]):
                raise ValueError(
                    f"multi_modal_data[{modality!r}] has no data for a name in multi_modal_uuids: with "
                    "kv_pool.media_bytes media are named by their content; send the data"
                )
        return {}

    renderer._process_mm_uuids = name


@contextmanager
def keep_media_in_front_end(model_config: ModelConfig, renderer: Callable[[], BaseRenderer]) -> Iterator[None]:
    """Start an instance inside the block without upstream's cache, and give its renderer one of the front end alone.

    Prompts of a stage with several instances are rendered once, by one of them. Upstream's cache leaves out media that
    it has sent before, to whichever instance that was.
    """
    from vllm.multimodal.cache import MultiModalProcessorOnlyCache

    multimodal = model_config.multimodal_config
    num_gb = 0.0 if multimodal is None else multimodal.mm_processor_cache_gb
    if multimodal is None or num_gb <= 0:
        yield
        return
    multimodal.mm_processor_cache_gb = 0.0
    yield
    multimodal.mm_processor_cache_gb = num_gb
    renderer()._mm_processor_cache = MultiModalProcessorOnlyCache(model_config)


def uncompiled_logprob_ranks() -> None:
    """Let the sampler compute ranks of tokens without torch.compile, which saves a copy of the logits on GPUs alone."""
    from vllm.v1.sample import sampler

    compiled = sampler.batched_count_greater_than
    sampler.batched_count_greater_than = getattr(compiled, "__wrapped__", compiled)


def uncompiled_vocabulary_masks() -> None:
    """Let ranks find the ids of their part of the vocabulary without torch.compile, which helps GPUs alone."""
    from vllm.model_executor.layers import vocab_parallel_embedding as embedding

    compiled = embedding.get_masked_input_and_mask
    embedding.get_masked_input_and_mask = getattr(compiled, "__wrapped__", compiled)


def replace_zero_experts(choose: Callable[..., Any], scale: Callable[..., Any]) -> None:
    """Let the router of models with experts that compute nothing call these instead of functions with CUDA kernels.

    Args:
        choose: the experts of each token, and their weights.
        scale: what the experts that compute nothing add.
    """
    from vllm.model_executor.layers.fused_moe.router import zero_expert_router as router

    router.fused_topk_bias, router.zero_experts_compute_triton = choose, scale


@contextmanager
def quiet_groups_of_one_rank() -> Iterator[None]:
    """Make process groups of one rank with torch's "fake" backend inside the block, where vLLM asks for gloo.

    That backend copies a rank's own values and sends nothing, which is all that a collective of one rank does.
    """
    import torch.distributed as dist

    make_world, make_group = dist.init_process_group, dist.new_group

    def init_process_group(backend: str, *, world_size: int, **kwargs: Any) -> None:
        make_world("fake" if world_size == 1 else backend, world_size=world_size, **kwargs)

    def new_group(ranks: Sequence[int] | None = None, *, backend: str, **kwargs: Any) -> Any:
        num_ranks = dist.get_world_size() if ranks is None else len(ranks)
        return make_group(ranks, backend="fake" if num_ranks == 1 else backend, **kwargs)

    dist.init_process_group, dist.new_group = init_process_group, new_group
    try:
        yield
    finally:
        dist.init_process_group, dist.new_group = make_world, make_group


def start_engine_cores_in(context: Callable[[], BaseContext | None]) -> None:
    """Let a function choose the context in which engine cores start; where it returns None, vLLM chooses."""
    from vllm.utils.system_utils import get_mp_context
    from vllm.v1.engine import utils

    utils.get_mp_context = lambda: context() or get_mp_context()


def start_workers_in(context: Callable[[], BaseContext | None]) -> None:
    """The same for the workers of an engine core's ranks."""
    from vllm.utils.system_utils import get_mp_context
    from vllm.v1.executor import multiproc_executor

    multiproc_executor.get_mp_context = lambda: context() or get_mp_context()


def inspect_models_here() -> None:
    """Let vLLM import a model's class in this process to see what it can do, which it remembers in a file."""
    from vllm.model_executor.models import registry

    def inspect_here(inspect: Callable[[], T]) -> T:
        with warnings.catch_warnings(action="ignore"):  # of what it imports
            return inspect()

    registry._run_in_subprocess = inspect_here


def register_kernels_once() -> None:
    """Replace vLLM's Triton kernels by those of this platform now, in this process and in what is forked from it.

    vLLM searches all modules for references each time that a worker starts.
    """
    from vllm.platforms import current_platform

    current_platform.register_triton_kernel_overrides()
    type(current_platform).register_triton_kernel_overrides = classmethod(lambda cls: None)


def configure_logging_at_once() -> None:
    """Let vLLM's configuration of loggers clear their caches once, in this process and in what is forked from it."""
    from vllm import logger

    upstream = logger.dictConfig

    def configure(config: dict[str, Any]) -> None:
        clear_cache = logging.Manager._clear_cache  # type: ignore[attr-defined]
        logging.Manager._clear_cache = lambda manager: None  # type: ignore[attr-defined]
        try:
            upstream(config)
        finally:
            logging.Manager._clear_cache = clear_cache  # type: ignore[attr-defined]
            clear_cache(logging.root.manager)

    logger.dictConfig = configure


def wait_without_spinning() -> None:
    """Let ranks and their engine core wait for messages without keeping a core busy, in what is forked from here."""
    from vllm.distributed.device_communicators.shm_broadcast import SpinCondition

    upstream = SpinCondition.wait

    def wait(condition: SpinCondition, timeout_ms: int | None = None) -> None:
        if time.monotonic() < condition.last_read + 1.0:  # the first notification may come before it can be received
            timeout_ms = LOOK_MS if timeout_ms is None else min(timeout_ms, LOOK_MS)
        upstream(condition, timeout_ms)

    SpinCondition.wait = wait
    SpinCondition.__init__.__defaults__ = (SPIN_S,)


def end_without_collecting() -> None:
    """Leave what is frozen out of collections, in this process and in what is forked from it, also at their ends.

    vLLM's engine cores and workers unfreeze it then, for those that run in a process that goes on.
    """
    gc.unfreeze = lambda: None


def filter_logs(log_filter: logging.Filter) -> None:
    """Filter what vLLM's handler logs, whenever vLLM configures it, and what transformers says of configurations."""
    from vllm.logger import DEFAULT_LOGGING_CONFIG

    DEFAULT_LOGGING_CONFIG["filters"] = {"vllm_omni": {"()": lambda: log_filter}}
    DEFAULT_LOGGING_CONFIG["handlers"]["vllm"]["filters"] = ["vllm_omni"]
    for handler in logging.getLogger("vllm").handlers:
        handler.addFilter(log_filter)
    logging.getLogger("transformers.configuration_utils").addFilter(log_filter)


def name_processes(stage: str) -> None:
    """Have vLLM put a stage's name into the title of this process: VLLM::talker::EngineCore."""
    from vllm.utils.system_utils import set_process_title

    suffix, prefix = set_process_title.__defaults__ or ("", "VLLM")
    set_process_title.__defaults__ = suffix, f"{prefix}::{stage}"


def extend_request_state(state: object, cls: type[T]) -> T:
    """Make a request state that upstream has just created an object of ``cls``, a subclass of its class.

    Fails if ``RequestState`` gets ``__slots__``.
    """
    state.__class__ = cls
    assert isinstance(state, cls)
    return state


def hash_blocks_by(request: Request, hasher: Callable[[Request], list[BlockHash]]) -> None:
    """Let a function compute the block hashes of a request that is not scheduled yet.

    Args:
        hasher: returns the hashes behind ``request.block_hashes``.
    """
    request._block_hasher = hasher
    request.block_hashes.clear()
    request.update_block_hashes()


def adopt(cls: type[T], upstream: object) -> T:
    """Make an object of ``cls`` with the attributes of ``upstream``, an object of a base class; they share values."""
    adopted = cls.__new__(cls)
    adopted.__dict__.update(upstream.__dict__)
    return adopted
