"""Check at start that a pipeline answers a request, and which merge rules hold for its weights and its precision.

Three small requests with steps, guidance, seeds and prompts of their own run side by side. The calls of each network in
``RULES`` are computed merged and alone; where the results differ by more than rounding, or the calls cannot be merged,
requests will not share the calls of that network.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor

from vllm_omni.config.diffusion_params import DiffusionParams
from vllm_omni.diffusion.extra_arguments import uncarried_arguments
from vllm_omni.diffusion.merge_rules import RULES, MergeRule
from vllm_omni.diffusion.merging import Fingerprints, group_key, merge, split
from vllm_omni.diffusion.outputs import collect
from vllm_omni.diffusion.pipeline_arguments import image_parameter, needs_image, parameters_of, pipeline_arguments
from vllm_omni.diffusion.pipeline_copy import PipelineCopies
from vllm_omni.diffusion.request import DiffusionRequest
from vllm_omni.diffusion.suspended_call import PendingCall, SuspendedCall, forget_frames
from vllm_omni.errors import ConfigError

logger = logging.getLogger(__name__)

# Largest difference, relative to the output's largest value. float32: sums in another order, through some tens of
# layers; bfloat16 (8 bits) and float16 (11 bits): about 13 and 10 times one rounding. Exchanged rows, or attention
# beyond the end of a text, make a difference of the order of the output.
TOLERANCES = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}

# Two of equal length for any tokenizer, and a longer one.
PROMPTS = ("a b c d", "d c b a", "a lake between two mountains in the early morning, oil on canvas")
NEGATIVE_PROMPTS = ("e f", "f e", "blurred, with a frame")
SIDES = (32, 64, 128, 256, 512)  # pixels; tried in order until the pipeline accepts one
NUM_FRAMES = 9  # 4k + 1 and 8k + 1
# Of the first request; each later one makes one more, so that their timesteps differ from the second step on. Four are
# enough for both of Wan2.2's experts to be called with every published shift.
NUM_STEPS = 4
GUIDANCE = 2.0  # of the first request; each later one has 1.0 more
# Turn off rewriting of prompts by a language model, and rounding to a large size.
SHORT_CUTS = {"enable_prompt_rewrite": False, "use_resolution_binning": False}
NUM_COMPARED = 4  # calls of each network: two steps with both branches of the guidance
# Errors that do not come from a small size, whatever they say.
NOT_ABOUT_SIZE = (NotImplementedError, TypeError, AttributeError, KeyError, ImportError, torch.OutOfMemoryError)


class MergeCheckFailed(Exception):
    """Merged and separate computation gave different results; the message says how."""


def find_merging_rules(pipeline: Any, table: Mapping[str, MergeRule] = RULES) -> dict[str, MergeRule]:
    """Find the rules that hold, by component name; log a warning for each network that cannot merge requests.

    Call under ``torch.no_grad()``. Takes some forwards at the smallest size that the pipeline accepts.

    Raises:
        ConfigError: the pipeline answers no request.
    """
    copies = PipelineCopies(pipeline)
    names = {component: type(module).__name__ for component, module in copies.modules.items()}
    candidates = {component: table[name] for component, name in names.items() if name in table}
    for component in sorted(copies.denoisers - candidates.keys()):
        said = "%s (%s) is not in the table of networks that merge requests: it computes one request at a time"
        logger.warning(said, names[component], component)
    results = _run_as_accepted(pipeline, copies, candidates)
    rules = {}
    for component, result in results.items():
        if isinstance(result, str):
            logger.warning("%s (%s) does not merge requests: %s", names[component], component, result)
            continue
        rules[component] = result
        if result is not candidates[component]:
            logger.warning("%s (%s) merges only requests with texts of equal length", names[component], component)
    return rules


def _run_as_accepted(
    pipeline: Any, copies: PipelineCopies, candidates: Mapping[str, MergeRule]
) -> dict[str, MergeRule | str]:
    """Run the check with the first kind of requests that the pipeline answers: with all arguments, or the fewest.

    Raises:
        ConfigError: it answers none, so it could not serve requests either.
    """
    image_choices = [True] if needs_image(pipeline) else [False, True] if image_parameter(pipeline) else [False]
    error: Exception | None = None
    for is_plain, has_image in itertools.product((False, True), image_choices):
        make = partial(make_request, pipeline, has_image=has_image, is_plain=is_plain)
        try:
            with _quiet_diffusers():
                return _run_at_some_size(pipeline, copies, candidates, make, is_last=is_plain)
        except Exception as exc:
            error = forget_frames(exc)
    said = f"{type(pipeline).__name__} answers no request: {describe(error).rstrip('.')}"
    if missing := uncarried_arguments(type(pipeline)):
        said += f"; only text, numbers and images reach a pipeline, and it also takes {', '.join(missing)}"
    raise ConfigError(f"{said} (merge: false in the section diffusion starts it unchecked)") from error


def _run_at_some_size(
    pipeline: Any,
    copies: PipelineCopies,
    candidates: Mapping[str, MergeRule],
    make: Callable[[int, int | None], DiffusionRequest],
    *,
    is_last: bool,
) -> dict[str, MergeRule | str]:
    """Run the check at the first of ``SIDES`` that the pipeline accepts, else at its default size.

    An error with the same text at two sizes hardly depends on the size; the default is then tried only for ``is_last``.
    """

    def run(side: int | None) -> dict[str, MergeRule | str]:
        requests = [make(index, side) for index in range(len(PROMPTS))]
        calls = [SuspendedCall(copies, pipeline_arguments(pipeline, request)) for request in requests]
        results = _run_side_by_side(calls, candidates)
        with suppress(FloatingPointError):  # a small picture may not be finite where larger ones are
            collect(pipeline, calls[0].result, requests[0].params.output_type)
        return results

    errors: list[str] = []
    for side in SIDES if "height" in parameters_of(pipeline) else ():
        try:
            return run(side)
        except NOT_ABOUT_SIZE:
            raise
        except Exception as exc:
            errors.append(describe(exc))
            if errors.count(errors[-1]) > 1:
                if is_last:
                    break
                raise
    return run(None)


@contextmanager
def _quiet_diffusers() -> Iterator[None]:
    """Keep the warnings of pipelines about requests that no user made out of the log."""
    diffusers_logger = logging.getLogger("diffusers")
    level = diffusers_logger.level
    diffusers_logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        diffusers_logger.setLevel(level)


def make_request(
    pipeline: Any, index: int, side: int | None, *, has_image: bool = False, is_plain: bool = False
) -> DiffusionRequest:
    """Make request ``index`` of the check, with every argument that the pipeline accepts, or only the needed ones."""
    accepted = parameters_of(pipeline)
    values: dict[str, Any] = {"height": side, "width": side, "num_inference_steps": NUM_STEPS + index}
    if not is_plain:
        values |= {
            "num_frames": NUM_FRAMES,
            "negative_prompt": NEGATIVE_PROMPTS[index],
            "guidance_scale": GUIDANCE + index,
            "true_cfg_scale": GUIDANCE + index,
        }
    short_cuts = {} if is_plain else SHORT_CUTS | ({"max_area": side**2} if side else {})
    extra_args = {name: value for name, value in short_cuts.items() if name in accepted}
    taken = {name: value for name, value in values.items() if name in accepted}
    params = DiffusionParams(seed=index, extra_args=extra_args, **taken)
    images = [make_image(index, side or 512)] if has_image else []
    return DiffusionRequest(prompt=PROMPTS[index] if "prompt" in accepted else "", images=images, params=params)


def make_image(seed: int, side: int) -> Any:
    """Make a square image of noise."""
    from PIL import Image

    generator = torch.Generator().manual_seed(seed)
    return Image.fromarray(torch.randint(0, 256, (side, side, 3), generator=generator, dtype=torch.uint8).numpy())


def _run_side_by_side(
    calls: Sequence[SuspendedCall], candidates: Mapping[str, MergeRule]
) -> dict[str, MergeRule | str]:
    """Find for each component the rule that held, or the reason why none did.

    Raises:
        Exception: the error of a request that failed.
    """
    finder = _RuleFinder(candidates)
    try:
        for call in calls:
            _resume(call)
        while running := _next_calls(calls):
            waiting = [call.pending for call in running if call.pending is not None]
            values = [pending.run() for pending in waiting]
            if len(waiting) == len(calls):
                finder.add(waiting, values)
            for call, value in zip(running, values, strict=True):
                _resume(call, value)
    finally:
        for call in calls:
            call.cancel()
    return finder.results


def _next_calls(calls: Sequence[SuspendedCall]) -> list[SuspendedCall]:
    """Those that wait for a denoiser, else all: a request with fewer steps waits at its decoder for the others."""
    running = [call for call in calls if call.pending is not None]
    return [call for call in running if call.pending is not None and call.pending.is_denoiser] or running


def _resume(call: SuspendedCall, value: Any = None) -> None:
    call.resume(value)
    if call.error is not None:
        raise call.error


class _RuleFinder:
    """Notes in ``results`` for each component the rule that has held so far, or the reason why none has."""

    def __init__(self, candidates: Mapping[str, MergeRule]) -> None:
        self.results: dict[str, MergeRule | str] = dict.fromkeys(candidates, "it was not called")
        self._candidates = candidates
        self._num_compared: Counter[str] = Counter()
        self._fingerprints = Fingerprints()

    def add(self, calls: Sequence[PendingCall], outputs: Sequence[Any]) -> None:
        """Compare the first ``NUM_COMPARED`` calls of each component; ``outputs`` were computed one by one."""
        component = calls[0].component
        if component not in self._candidates or any(call.component != component for call in calls):
            return
        self._num_compared[component] += 1
        is_first = self._num_compared[component] == 1
        rule = self._candidates[component] if is_first else self.results[component]
        if isinstance(rule, MergeRule) and self._num_compared[component] <= NUM_COMPARED:
            self.results[component] = self._find(calls, outputs, rule, self._candidates[component])

    def _find(
        self, calls: Sequence[PendingCall], outputs: Sequence[Any], rule: MergeRule, candidate: MergeRule
    ) -> MergeRule | str:
        """Return ``rule`` if it holds, else the rule without padding if that holds, else the reason."""
        reason = ""
        for attempt in [rule, *([candidate.without_padding()] if rule.padded else [])]:
            count = len(calls) if attempt is candidate else 2  # the third's text is longer
            try:
                compare(calls[:count], outputs[:count], attempt, self._fingerprints)
            except Exception as exc:
                reason = reason or describe(exc)
            else:
                return attempt
        return reason


def compare(calls: Sequence[PendingCall], outputs: Sequence[Any], rule: MergeRule, fingerprints: Fingerprints) -> None:
    """Compare the outputs of merged ``calls`` with ``outputs``, computed one by one.

    Raises:
        MergeCheckFailed: the outputs differ, or the calls cannot be merged.
    """
    keys = {group_key(call, rule, fingerprints) for call in calls}
    if len(keys) != 1:
        raise MergeCheckFailed("calls of the same shape cannot be merged")
    merged, counts = merge(calls, rule)
    together = split(dataclasses.replace(calls[0], kwargs=merged).run(), calls, counts, rule)
    for one, alone in zip(together, outputs, strict=True):
        for ours, theirs in zip(tensors_of(one), tensors_of(alone), strict=True):
            difference = relative_difference(ours, theirs)
            allowed = TOLERANCES.get(theirs.dtype, 0.0)
            if not difference <= allowed:
                raise MergeCheckFailed(
                    f"merged and alone differ by {difference:.1e} of the output's scale, {allowed:.0e} is rounding"
                )


def relative_difference(ours: Tensor, theirs: Tensor) -> float:
    """Largest difference over the largest value; infinite where NaNs or shapes do not match."""
    if not torch.equal(ours.isnan(), theirs.isnan()):  # also False for other shapes
        return math.inf
    if not theirs.numel():
        return 0.0
    ours, theirs = (one.double().nan_to_num() for one in (ours, theirs))
    difference, scale = (one.abs().max().item() for one in (ours - theirs, theirs))
    return difference / scale if scale else (math.inf if difference else 0.0)


def describe(error: Exception | None) -> str:
    return str(error) if isinstance(error, MergeCheckFailed) else f"{type(error).__name__}: {error}"


def tensors_of(output: Any) -> Iterator[Tensor]:
    """Tensors of a network's output that a pipeline may read, in order."""
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, Mapping):
        yield from tensors_of([value for name, value in output.items() if name != "past_key_values"])
    elif isinstance(output, tuple | list):
        for value in output:
            yield from tensors_of(value)
