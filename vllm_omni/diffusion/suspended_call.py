"""``SuspendedCall``: run a pipeline's unmodified ``__call__`` and suspend it wherever it calls one of its networks.

A request gets a shallow copy of the pipeline with its networks replaced by proxies. The copy's ``__call__`` runs in a
greenlet; a call of a proxy hands the arguments to the caller of ``resume``, which computes the output, perhaps together
with those of other requests, and passes it to the next ``resume``.

Greenlets rather than threads: they switch in the pipelines' own order, cost half as much, and share one pool of OpenMP
threads. The price: what torch keeps per thread is shared. So everything must run inside ``torch.no_grad()`` (nested
``no_grad`` blocks may then be left in any order), and a call under autocast is computed at once, without suspending.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor, nn

from vllm_omni.diffusion.greenlets import import_greenlet, is_autocast, return_here
from vllm_omni.diffusion.pipeline_copy import CODERS, PipelineCopies

CODER_METHODS = ("decode", "encode")  # that pipelines call by name; the latter is computed in place


class Limits(Protocol):
    """Raises ``InvalidRequest``, into the pipeline, for what a request may not compute: see ``CallLimits``."""

    def check_steps(self, num_steps: int) -> None: ...

    def check_call(self, call: PendingCall, arguments: Mapping[str, Any]) -> None: ...


class PipelineCancelled(BaseException):
    """Thrown into the pipeline of an aborted request; ``except Exception`` in a pipeline does not catch it."""


@dataclass(eq=False)
class PendingCall:
    """The network call that a suspended pipeline waits for."""

    component: str  # the pipeline's name of the network: "transformer_2"
    module: nn.Module
    method: str  # "forward", called through __call__, or one of ``CODER_METHODS``
    kwargs: dict[str, Any]  # all arguments that can be passed by name
    positional: tuple[Any, ...]  # the others (*args)
    branch: str  # of the guidance: "cond" or "uncond"; "#k" for call k of this step where the pipeline names none
    is_denoiser: bool

    def run(self) -> Any:
        """Compute this call alone, as the pipeline itself would."""
        function = self.module if self.method == "forward" else getattr(self.module, self.method)
        return function(*self.positional, **self.kwargs)


class ModuleProxy:
    """Stands for a network in a request's copy of the pipeline; calls suspend the request.

    ``isinstance`` sees the network's class: pipelines look for an ``nn.Module`` among their components to find their
    device.
    """

    def __init__(self, owner: SuspendedCall, component: str, module: nn.Module, *, is_denoiser: bool):
        vars(self).update(_owner=owner, _component=component, _module=module, _is_denoiser=is_denoiser, _branch="")

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return type(self._module)

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._module, name)
        if name not in CODER_METHODS or self._component not in CODERS:
            return value

        @functools.wraps(value)  # pipelines read its signature
        def suspend(*args: Any, **kwargs: Any) -> Any:
            return self._suspend(name, args, kwargs)

        return suspend

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._module, name, value)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._suspend("forward", args, kwargs)

    def _suspend(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        call = PendingCall(self._component, self._module, method, kwargs, args, self._branch, self._is_denoiser)
        return self._owner.call(call)

    @contextmanager
    def cache_context(self, name: str, **kwargs: Any) -> Iterator[None]:
        """Note the branch of the guidance; diffusers' own cache, which this would select, is not used."""
        before = self._branch
        vars(self)["_branch"] = name
        try:
            yield
        finally:
            vars(self)["_branch"] = before


class StepCounter:
    """Counts the steps of one request, and the network calls within each step."""

    def __init__(self, limits: Limits | None) -> None:
        self._limits = limits
        self.step_index = 0  # steps done
        self.num_steps = 0  # of the whole run; 0: not known yet
        self._calls: dict[str, int] = {}  # component -> calls since the last step

    def count_call(self, component: str) -> int:
        """Number of earlier calls of ``component`` in this step."""
        number = self._calls.get(component, 0)
        self._calls[component] = number + 1
        return number

    def progress_bar(self, iterable: Iterable[Any] | None = None, total: int | None = None) -> CountingBar:
        """Replace ``DiffusionPipeline.progress_bar``. A pipeline with several passes has a bar for each."""
        values = [] if iterable is None else list(iterable)
        num_steps = len(values) or total or 0
        if self._limits is not None:
            self._limits.check_steps(num_steps)
        self.num_steps += num_steps
        return CountingBar(self, values)

    def advance(self, count: int) -> None:
        self.step_index += count
        self._calls.clear()


class CountingBar:
    """The part of tqdm's interface that pipelines use."""

    def __init__(self, counter: StepCounter, values: list[Any]):
        self._counter = counter
        self._values = values

    def __enter__(self) -> CountingBar:
        return self

    def __iter__(self) -> Iterator[Any]:
        for value in self._values:
            yield value
            self._counter.advance(1)

    def __len__(self) -> int:
        return len(self._values)

    def update(self, n: int = 1) -> None:
        self._counter.advance(int(n))

    def _ignore(self, *args: Any, **kwargs: Any) -> None:
        pass

    __exit__ = close = set_description = set_postfix = _ignore


class SuspendedCall:
    """A pipeline's call for one output of a request. Resumed from one thread only, under ``torch.no_grad()``.

    ``pending`` is the network call that it waits for; None before the first ``resume`` and after the end. After the end
    either ``error`` is set, or ``result`` is what the pipeline returned.

    Raises:
        MissingDependency: greenlet is not installed.
    """

    def __init__(
        self,
        copies: PipelineCopies,
        arguments: Mapping[str, Any],
        request_id: str = "",
        output_index: int = 0,
        limits: Limits | None = None,
    ):
        self.request_id = request_id
        self.output_index = output_index
        self.last_turn = 0  # of a batcher: the latest forward for this call, counted over all calls
        self.preview: Tensor | None = None  # uint8 [H, W, 3], decoded since the last step
        self.pending: PendingCall | None = None
        self.result: Any = None
        self.error: Exception | None = None
        self.has_ended = False
        self.has_denoised = False  # a denoiser was called
        self.progress = StepCounter(limits)
        self.arguments = dict(arguments)  # of the pipeline's call; more may be added until it starts
        self._copies = copies
        self._limits = limits
        self._greenlets = import_greenlet("a diffusion stage")
        self._greenlet: Any = None

    @property
    def has_started(self) -> bool:
        return self._greenlet is not None or self.has_ended

    def resume(self, value: Any = None) -> PendingCall | None:
        """Run to the next network call or to the end.

        Args:
            value: what the pending call returns; unused at the first ``resume``.

        Returns:
            ``pending``.
        """
        return self._switch(lambda: self._greenlet.switch(value))

    def throw(self, error: Exception) -> PendingCall | None:
        """Resume with the pending call raising ``error``."""
        return self._switch(lambda: self._greenlet.throw(error))

    def cancel(self) -> None:
        """End the call at once; the ``finally`` blocks of the pipeline run. Does nothing after the end."""
        running, self._greenlet = self._greenlet, None
        if running is not None and not running.dead:
            return_here(running)
            for _ in range(100):  # repeated for a pipeline that catches the exception and calls a network again
                if running.dead:
                    break
                running.throw(PipelineCancelled)
        self._end()

    def call(self, call: PendingCall) -> Any:
        """Suspend until ``call`` is answered. Called by a proxy, with the arguments as the pipeline passed them."""
        signature = self._copies.signature(call.component, call.method)
        call.positional, call.kwargs = bind(signature, call.positional, call.kwargs)
        if self._limits is not None and not self.has_denoised:  # later passes may be larger than the first
            self._limits.check_call(call, self.arguments)
        if call.method == "encode" or self._greenlets.getcurrent() is not self._greenlet or is_autocast():
            return call.run()
        number = self.progress.count_call(call.component)
        call.branch = call.branch or f"#{number}"
        self.has_denoised |= call.is_denoiser
        return self._greenlet.parent.switch(call)

    def _switch(self, switch: Callable[[], Any]) -> PendingCall | None:
        assert not self.has_ended, "resumed after its end"
        if self._greenlet is None:
            self._greenlet = self._greenlets.greenlet(self._run)
        return_here(self._greenlet)
        self.pending = None  # frees its tensors while the pipeline continues
        self.pending = switch()
        if self._greenlet.dead:
            self._end()
        return self.pending

    def _run(self, _: Any) -> None:
        pipeline = None
        try:
            pipeline = self._copies.make(self._make_proxy, self.progress.progress_bar, self.arguments.get("generator"))
            self.result = pipeline(**self.arguments)
        except PipelineCancelled:
            pass
        except Exception as exc:
            self.error = forget_frames(exc)
        finally:
            if (scheduler := getattr(pipeline, "scheduler", None)) is not None:
                vars(scheduler).pop("step", None)  # a reference cycle, which would keep the tensors for some time

    def _make_proxy(self, component: str) -> ModuleProxy:
        is_denoiser = component in self._copies.denoisers
        return ModuleProxy(self, component, self._copies.modules[component], is_denoiser=is_denoiser)

    def _end(self) -> None:
        self.has_ended = True
        self.pending = None
        self.arguments = {}
        self._greenlet = None


def bind(
    signature: inspect.Signature, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Sort arguments into those that cannot be passed by name and those that can.

    Raises:
        TypeError: the arguments do not fit the signature.
    """
    bound = signature.bind(*args, **kwargs)
    positional: list[Any] = []
    named: dict[str, Any] = {}
    for name, value in bound.arguments.items():
        kind = signature.parameters[name].kind
        if kind is inspect.Parameter.VAR_POSITIONAL:
            return args, kwargs  # arguments before *args cannot be passed by name
        if kind is inspect.Parameter.VAR_KEYWORD:
            named.update(value)
        elif kind is inspect.Parameter.POSITIONAL_ONLY:
            positional.append(value)
        else:
            named[name] = value
    return tuple(positional), named


def forget_frames(error: Exception) -> Exception:
    """Remove the tracebacks of an error and its causes, whose frames hold the tensors of a pipeline's call."""
    seen: set[int] = set()
    todo: list[BaseException | None] = [error]
    while todo:
        one = todo.pop()
        if one is not None and id(one) not in seen:
            seen.add(id(one))
            one.__traceback__ = None
            todo += [one.__cause__, one.__context__]
    return error
