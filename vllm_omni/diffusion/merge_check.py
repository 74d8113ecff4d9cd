"""At start: does the table of ``merging`` hold for these weights, in this precision, with this attention?

Three small requests go through the pipeline in step, two of them with prompts of one length. Every call of a network
that the table knows is computed merged and alone; where the two differ by more than rounding, or the calls do not fit
together, the network is not merged.
"""

from __future__ import annotations

import inspect
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from vllm_omni.config.diffusion_params import DiffusionParams
from vllm_omni.diffusion.merging import RULES, Fingerprints, MergeRule, group_key, merge, split
from vllm_omni.diffusion.request import NEEDS_IMAGE, DiffusionRequest, pipeline_arguments
from vllm_omni.diffusion.suspended_call import CopiedPipeline, PendingCall, SuspendedCall

logger = logging.getLogger(__name__)

# Largest difference, of the output's largest value. float32: sums in another order, through some tens of layers; in
# bfloat16 (8 bits) and float16 (11 bits) about 13 and 10 times what one rounding does. Rows that are exchanged, or text
# that is attended to beyond its end, make a difference of the order of the output.
TOLERANCES = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}

# Two of one length for any tokenizer, and a longer one.
PROMPTS = ("a b c d", "d c b a", "a lake between two mountains in the early morning, oil on canvas")
NEGATIVE_PROMPTS = ("e f", "f e", "blurred, with a frame")
SIDES = (32, 64, 128, 256, 512, None)  # pixels, until one is accepted
NUM_FRAMES = 9  # 4k + 1 and 8k + 1
# Enough that both of Wan2.2's experts have their turn with every published shift.
NUM_STEPS = 4
# Not to have a language model write the prompts anew, and to keep to the small size.
SHORT_CUTS = {"enable_prompt_rewrite": False, "use_resolution_binning": False}
NUM_COMPARED = 2  # calls of each network: those of both branches of the guidance


class MergeCheckFailed(Exception):
    """Two ways to compute the same thing gave two results, or none; the message says what."""


def find_merging_rules(pipeline: Any, table: Mapping[str, MergeRule] = RULES) -> dict[str, MergeRule]:
    """The rules that hold, by the pipeline's names of its components; each of the others has its log line.

    Call under ``torch.no_grad()``. Takes some forwards at the smallest size that the pipeline accepts.
    """
    copied = CopiedPipeline(pipeline)
    for component in sorted(copied.denoisers):
        if type(copied.modules[component]).__name__ not in table:
            logger.warning(
                "%s (%s) is not in the table of networks that merge requests: one request at a time",
                type(copied.modules[component]).__name__,
                component,
            )
    candidates = {
        component: table[type(module).__name__]
        for component, module in copied.modules.items()
        if type(module).__name__ in table
    }
    if not candidates:
        return {}
    results: dict[str, MergeRule | str] = {}
    for side in SIDES:
        requests = [make_request(pipeline, index, side) for index in range(len(PROMPTS))]
        try:
            calls = [SuspendedCall(copied, pipeline_arguments(pipeline, request)) for request in requests]
            results = _run_in_step(calls, candidates)
            break
        except Exception as exc:  # the size, most likely; if not, requests will fail in the same way
            results = dict.fromkeys(candidates, f"the test's own requests fail: {describe(exc)}")
    rules = {}
    for component, result in results.items():
        name = type(copied.modules[component]).__name__
        if isinstance(result, str):
            logger.warning("%s (%s) does not merge requests: %s", name, component, result)
            continue
        rules[component] = result
        if result is not candidates[component]:
            logger.warning("%s (%s) merges only requests with texts of one length", name, component)
    return rules


def make_request(pipeline: Any, index: int, side: int | None) -> DiffusionRequest:
    """The ``index``-th of the test, with everything that the pipeline takes."""
    accepted = inspect.signature(type(pipeline).__call__).parameters
    values: dict[str, Any] = {
        "height": side,
        "width": side,
        "num_frames": NUM_FRAMES,
        "num_inference_steps": NUM_STEPS,
        "negative_prompt": NEGATIVE_PROMPTS[index],
        "true_cfg_scale": 2.0,
    }
    extra_args = {name: value for name, value in SHORT_CUTS.items() if name in accepted}
    taken = {name: value for name, value in values.items() if name in accepted}
    params = DiffusionParams(seed=index, extra_args=extra_args, **taken)
    name = type(pipeline).__name__
    needs_image = "image" in accepted and (
        NEEDS_IMAGE.search(name) or accepted["image"].default is inspect.Parameter.empty
    )
    images = [make_image(index, side or 512)] if needs_image else []
    return DiffusionRequest(prompt=PROMPTS[index] if "prompt" in accepted else "", images=images, params=params)


def make_image(seed: int, side: int) -> Any:
    """A square of noise."""
    from PIL import Image

    generator = torch.Generator().manual_seed(seed)
    return Image.fromarray(torch.randint(0, 256, (side, side, 3), generator=generator, dtype=torch.uint8).numpy())


def _run_in_step(calls: Sequence[SuspendedCall], candidates: Mapping[str, MergeRule]) -> dict[str, MergeRule | str]:
    """For each component the rule that held, or why none did.

    Raises:
        Exception: what a request failed with.
    """
    results: dict[str, MergeRule | str] = dict.fromkeys(candidates, "it was not called")
    compared = dict.fromkeys(candidates, 0)
    fingerprints = Fingerprints()
    try:
        for call in calls:
            call.resume()
        while not all(call.has_ended for call in calls):
            running = [call for call in calls if not call.has_ended]
            waiting = [call.pending for call in running if call.pending is not None]
            outputs = [pending.run() for pending in waiting]
            component = waiting[0].component
            if component in candidates and compared[component] < NUM_COMPARED and len(waiting) == len(calls):
                compared[component] += 1
                rule = results[component] if compared[component] > 1 else candidates[component]
                if isinstance(rule, MergeRule):
                    results[component] = _find_rule(waiting, outputs, rule, candidates[component], fingerprints)
            for call, output in zip(running, outputs, strict=True):
                call.resume(output)
            _raise_error(calls)
        _raise_error(calls)
    finally:
        for call in calls:
            call.cancel()
    return results


def _raise_error(calls: Sequence[SuspendedCall]) -> None:
    for call in calls:
        if call.error is not None:
            raise call.error


def _find_rule(
    calls: Sequence[PendingCall],
    outputs: Sequence[Any],
    rule: MergeRule,
    candidate: MergeRule,
    fingerprints: Fingerprints,
) -> MergeRule | str:
    """``rule`` (the candidate, or what an earlier call left of it) if it holds; or else less; or why nothing holds."""
    reason = ""
    for attempt in [rule, *([candidate.without_padding()] if rule.padded else [])]:
        count = len(calls) if attempt is candidate else 2  # the third's text is longer
        try:
            compare(calls[:count], outputs[:count], attempt, fingerprints)
        except Exception as exc:
            reason = reason or describe(exc)
        else:
            return attempt
    return reason


def compare(calls: Sequence[PendingCall], outputs: Sequence[Any], rule: MergeRule, fingerprints: Fingerprints) -> None:
    """Merge ``calls`` and hold what comes out against ``outputs``, which each gave alone.

    Raises:
        MergeCheckFailed: they differ, or the calls do not go together.
    """
    keys = {group_key(call, rule, fingerprints) for call in calls}
    if len(keys) != 1:
        raise MergeCheckFailed("calls of the same shape do not go together")
    merged, counts = merge(calls, rule)
    call = calls[0]
    function: Callable[..., Any] = call.module if call.method == "forward" else getattr(call.module, call.method)
    for one, alone in zip(split(function(**merged), calls, counts, rule), outputs, strict=True):
        for ours, theirs in zip(tensors_of(one), tensors_of(alone), strict=True):
            difference = relative_difference(ours, theirs)
            allowed = TOLERANCES.get(theirs.dtype, 0.0)
            if not difference <= allowed:
                raise MergeCheckFailed(
                    f"merged and alone differ by {difference:.1e} of the output's scale, {allowed:.0e} is rounding"
                )


def relative_difference(ours: Tensor, theirs: Tensor) -> float:
    """Largest difference over the largest value; infinite where one is no number and the other is, or shapes differ."""
    if ours.shape != theirs.shape:
        return math.inf
    ours, theirs = ours.double(), theirs.double()
    if not torch.equal(ours.isnan(), theirs.isnan()):
        return math.inf
    scale = theirs.nan_to_num().abs().max().item() if theirs.numel() else 0.0
    difference = (ours - theirs).nan_to_num().abs().max().item() if theirs.numel() else 0.0
    return difference / scale if scale else (math.inf if difference else 0.0)


def describe(error: Exception) -> str:
    return str(error) if isinstance(error, MergeCheckFailed) else f"{type(error).__name__}: {error}"


def tensors_of(output: Any) -> Iterator[Tensor]:
    """Those that a pipeline may read of a network's output, in order."""
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, Mapping):
        for name, value in output.items():
            if name != "past_key_values":
                yield from tensors_of(value)
    elif isinstance(output, tuple | list):
        for value in output:
            yield from tensors_of(value)
