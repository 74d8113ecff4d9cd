"""``SuspendedCall``: a pipeline's own ``__call__``, which stops wherever it calls one of its networks.

The pipeline's code is not touched. A request gets a shallow copy of the pipeline with its networks replaced by proxies;
its ``__call__`` runs in a greenlet, and a call of a proxy hands the arguments to whoever resumed the greenlet. That one
computes the output, perhaps together with those of other requests, and resumes with it.

Greenlets rather than threads: they switch in the pipelines' own order, cost half as much, and share one pool of OpenMP
threads. The price: what torch keeps per thread is shared. So everything must run inside ``torch.no_grad()`` (then any
order of leaving nested ``no_grad`` blocks is the same), and a call under autocast is computed at once, without
suspending.
"""

from __future__ import annotations

import copy
import functools
import inspect
import re
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from vllm_omni.diffusion.greenlets import import_greenlet, is_autocast, return_here

# Components whose call is a step of the request. The others' calls (text encoders, decoders) happen between two steps.
NEEDED_BY = "a diffusion stage"
DENOISER_NAME = re.compile(r"(transformer|unet|prior|decoder|denoiser|dit)(_\d+)?$")
DENOISER_CLASS = re.compile(r"Transformer|UNet|Unet|DiT")
# Decoders, called by a method of theirs.
METHODS = {"vae": "decode", "audio_vae": "decode", "video_vae": "decode", "vqvae": "decode"}


class Cancelled(BaseException):
    """Thrown into a pipeline whose request was aborted; no ``except Exception`` of a pipeline stops it."""


@dataclass(eq=False)
class PendingCall:
    """A call of a network that a pipeline waits for."""

    component: str  # the pipeline's name for it: "transformer_2"
    module: nn.Module
    method: str  # "forward", which goes by way of __call__, or "decode"
    kwargs: dict[str, Any]  # every argument by its name
    positional: tuple[Any, ...]  # those that have none (*args)
    branch: str  # of the guidance, "cond" or "uncond"; "#k": the k-th call of this step, in a pipeline that names none
    is_denoiser: bool

    def run(self) -> Any:
        """Alone, as the pipeline itself would have done."""
        function = self.module if self.method == "forward" else getattr(self.module, self.method)
        return function(*self.positional, **self.kwargs)


class Progress:
    """Stands in for a pipeline's progress bar, and counts."""

    def __init__(self) -> None:
        self.step_index = 0  # steps done
        self.num_steps = 0  # of all; 0: not known yet
        self.calls: dict[str, int] = {}  # component -> calls since the last step

    def bar(self, iterable: Iterable[Any] | None = None, total: int | None = None) -> ProgressBar:
        """In place of ``DiffusionPipeline.progress_bar``. A pipeline with several passes has a bar for each."""
        values = None if iterable is None else list(iterable)
        self.num_steps += (total or 0) if values is None else len(values)
        return ProgressBar(self, values)

    def advance(self, count: int) -> None:
        self.step_index += count
        self.calls.clear()


class ProgressBar:
    """The part of tqdm's interface that pipelines use."""

    def __init__(self, progress: Progress, values: list[Any] | None):
        self._progress = progress
        self._values = values or []

    def __enter__(self) -> ProgressBar:
        return self

    def __exit__(self, *exc_info: object) -> None:
        pass

    def __iter__(self) -> Iterator[Any]:
        for value in self._values:
            yield value
            self._progress.advance(1)

    def __len__(self) -> int:
        return len(self._values)

    def update(self, n: int = 1) -> None:
        self._progress.advance(int(n))

    def close(self) -> None:
        pass

    def set_description(self, desc: str | None = None, refresh: bool = True) -> None:
        pass

    def set_postfix(self, *args: Any, **kwargs: Any) -> None:
        pass


class ModuleProxy:
    """A network in a request's copy of the pipeline: the network itself in all but being called.

    ``isinstance`` sees the network's class: pipelines look for ``nn.Module`` among their components, for their device.
    """

    def __init__(self, owner: SuspendedCall, component: str, module: nn.Module, *, is_denoiser: bool):
        vars(self).update(_owner=owner, _component=component, _module=module, _is_denoiser=is_denoiser, _branch="")

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return type(self._module)

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._module, name)
        if name != METHODS.get(self._component):
            return value

        @functools.wraps(value)  # pipelines read its signature
        def suspend(*args: Any, **kwargs: Any) -> Any:
            return self._owner.call(self, name, *args, **kwargs)

        return suspend

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._module, name, value)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._owner.call(self, "forward", *args, **kwargs)

    @contextmanager
    def cache_context(self, name: str, **kwargs: Any) -> Iterator[None]:
        """Notes the branch of the guidance; diffusers' own cache, which this selects, is not in use."""
        before = self._branch
        vars(self)["_branch"] = name
        try:
            yield
        finally:
            vars(self)["_branch"] = before


class SuspendedCall:
    """One request's call of a pipeline. Resumed from one thread only, under ``torch.no_grad()``.

    ``pending`` is the call that it waits for; None before the first ``resume`` and when it has ended. Then either
    ``error`` is set, or ``result`` is what the pipeline returned.
    """

    def __init__(self, copied: CopiedPipeline, arguments: Mapping[str, Any]):
        self.pending: PendingCall | None = None
        self.result: Any = None
        self.error: Exception | None = None
        self.has_ended = False
        self.has_denoised = False  # a denoiser was called
        self.progress = Progress()
        self._copied = copied
        self.arguments = dict(arguments)  # of the pipeline's call; until it begins, more may be added
        self._greenlet: Any = None
        self._value: Any = None

    def resume(self, value: Any = None) -> PendingCall | None:
        """Run to the next call of a network, or to the end.

        Args:
            value: what the pending call returns; nothing at first.

        Returns:
            ``pending``.
        """
        return self._switch(lambda: self._greenlet.switch(value))

    def throw(self, error: Exception) -> PendingCall | None:
        """As ``resume``, but the pending call raises."""
        return self._switch(lambda: self._greenlet.throw(error))

    def cancel(self) -> None:
        """End it now, wherever it stands; its ``finally`` blocks run. Does nothing when it has ended."""
        running, self._greenlet = self._greenlet, None
        if running is not None and not running.dead:
            return_here(running)
            for _ in range(100):  # a pipeline that catches it and calls its network again gets another
                if running.dead:
                    break
                running.throw(Cancelled)
        self._end()

    def call(self, proxy: ModuleProxy, method: str, *args: Any, **kwargs: Any) -> Any:
        """The pipeline calls a network: suspend. (Called by the proxy.)"""
        greenlet = import_greenlet(NEEDED_BY)
        module = proxy._module
        if greenlet.getcurrent() is not self._greenlet or is_autocast():
            function = module if method == "forward" else getattr(module, method)
            return function(*args, **kwargs)
        positional, named = bind(self._copied.signature(proxy._component, method), args, kwargs)
        component = proxy._component
        number = self.progress.calls.get(component, 0)
        self.progress.calls[component] = number + 1
        self.has_denoised |= proxy._is_denoiser
        pending = PendingCall(
            component, module, method, named, positional, proxy._branch or f"#{number}", proxy._is_denoiser
        )
        return self._greenlet.parent.switch(pending)

    def _switch(self, switch: Callable[[], Any]) -> PendingCall | None:
        assert not self.has_ended, "resumed after its end"
        if self._greenlet is None:
            self._greenlet = import_greenlet(NEEDED_BY).greenlet(self._run)
        return_here(self._greenlet)
        self.pending = None  # its tensors are free while the pipeline goes on
        self.pending = switch()
        if self._greenlet.dead:
            self._end()
        return self.pending

    def _run(self, _: Any) -> None:
        pipeline = None
        try:
            pipeline = self._copied(self)
            self.result = pipeline(**self.arguments)
        except Cancelled:
            pass
        except Exception as exc:
            self.error = forget_frames(exc)
        finally:
            scheduler = getattr(pipeline, "scheduler", None)
            if scheduler is not None:
                vars(scheduler).pop("step", None)  # ours refers to the scheduler

    def _end(self) -> None:
        self.has_ended = True
        self.pending = None
        self.arguments = {}
        self._greenlet = None


class CopiedPipeline:
    """Makes the copy of a pipeline that one request runs on.

    Raises:
        MissingDependency: greenlet is not installed.
    """

    def __init__(self, pipeline: Any):
        import_greenlet(NEEDED_BY)  # or say what is missing, before a request needs it
        self._pipeline = pipeline
        self.denoisers = find_denoisers(pipeline)
        self.modules = {name: module for name, module in pipeline.components.items() if isinstance(module, nn.Module)}
        # What a deep copy must not go into: weights, and all that belongs to them.
        self._shared = {id(part): part for module in self.modules.values() for part in module.modules()}

        self.parameters = inspect.signature(type(pipeline).__call__).parameters
        self._signatures: dict[tuple[str, str], inspect.Signature] = {}

    def signature(self, component: str, method: str) -> inspect.Signature:
        """Of a method of a component; looked up once."""
        key = (component, method)
        if key not in self._signatures:
            self._signatures[key] = inspect.signature(getattr(self.modules[component], method))
        return self._signatures[key]

    def __call__(self, owner: SuspendedCall) -> Any:
        pipeline = copy.copy(self._pipeline)
        memo: dict[int, Any] = {**self._shared, id(self._pipeline): pipeline}
        own = vars(pipeline)
        for name, value in vars(self._pipeline).items():
            if name in self.modules:
                own[name] = ModuleProxy(owner, name, self.modules[name], is_denoiser=name in self.denoisers)
            elif is_mutable(value):
                own[name] = copy.deepcopy(value, memo)
        generator = owner.arguments.get("generator")
        if "scheduler" in own and generator is not None:
            own["scheduler"].step = with_generator(own["scheduler"].step, generator)
        own["progress_bar"] = owner.progress.bar
        # At the end of a call it would reset the state of all requests, and move offloaded weights.
        own["maybe_free_model_hooks"] = lambda: None
        return pipeline


def find_denoisers(pipeline: Any) -> set[str]:
    """Names of the components whose calls are the steps: by their names, or by their classes' where diffusers'."""
    names = set()
    for name, module in pipeline.components.items():
        if isinstance(module, nn.Module):
            is_diffusers = type(module).__module__.partition(".")[0] != "transformers"
            if is_diffusers and (DENOISER_NAME.match(name) or DENOISER_CLASS.search(type(module).__name__)):
                names.add(name)
    return names


def is_mutable(value: Any) -> bool:
    """Whether a request needs its own: schedulers, guiders and plain containers, but neither weights nor tokenizers."""
    if isinstance(value, nn.Module | torch.Tensor | torch.device | torch.dtype | type | types.FunctionType):
        return False
    if isinstance(value, str | bytes | int | float | complex | tuple | frozenset | None):
        return False
    return type(value).__module__.partition(".")[0] not in ("transformers", "tokenizers")


def with_generator(step: Callable[..., Any], generator: Any) -> Callable[..., Any]:
    """A scheduler's ``step`` whose noise, if it draws any, is the request's own where the pipeline does not say."""
    signature = inspect.signature(step)
    if "generator" not in signature.parameters:
        return step

    @functools.wraps(step)
    def own_step(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind_partial(*args, **kwargs).arguments
        if "generator" not in given and (not isinstance(generator, list) or len(generator) == len(given["sample"])):
            kwargs["generator"] = generator
        return step(*args, **kwargs)

    return own_step


def bind(
    signature: inspect.Signature, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments by their names, and those that cannot be named.

    Raises:
        TypeError: they do not fit.
    """
    bound = signature.bind(*args, **kwargs)
    positional: list[Any] = []
    named: dict[str, Any] = {}
    for name, value in bound.arguments.items():
        kind = signature.parameters[name].kind
        if kind is inspect.Parameter.VAR_KEYWORD:
            named.update(value)
        elif kind is inspect.Parameter.VAR_POSITIONAL:
            positional.extend(value)
        elif kind is inspect.Parameter.POSITIONAL_ONLY:
            positional.append(value)
        else:
            named[name] = value
    if any(signature.parameters[name].kind is inspect.Parameter.VAR_POSITIONAL for name in bound.arguments):
        return args, kwargs  # what precedes *args cannot be given by name
    return tuple(positional), named


def forget_frames(error: Exception) -> Exception:
    """Without its tracebacks, whose frames hold the tensors of a pipeline's call."""
    seen: set[int] = set()
    todo: list[BaseException | None] = [error]
    while todo:
        one = todo.pop()
        if one is not None and id(one) not in seen:
            seen.add(id(one))
            one.__traceback__ = None
            todo += [one.__cause__, one.__context__]
    return error
