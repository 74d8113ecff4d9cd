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

from vllm_omni.diffusion_params import DiffusionParams
from vllm_omni.errors import InvalidRequest
from vllm_omni.model_executor.diffusion.merging import RULES, Fingerprints, MergeRule, group_key, merge, split
from vllm_omni.model_executor.diffusion.request import NEEDS_IMAGE, DiffusionRequest, pipeline_arguments
from vllm_omni.model_executor.diffusion.suspended import CopiedPipeline, PendingCall, SuspendedCall

logger = logging.getLogger(__name__)

# Largest difference, of the output's largest value. float32: sums in another order, through some tens of layers; in
# bfloat16 (8 bits) and float16 (11 bits) about 13 and 10 times what one rounding does. Rows that are exchanged, or text
# that is attended to beyond its end, make a difference of the order of the output.
TOLERANCES = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}

PROMPTS = ("a red cat", "a big dog", "a lake between two mountains in the early morning, oil on canvas")
NEGATIVE_PROMPTS = ("grey", "dark", "blurred, with a frame")
SIDES = (64, 128, 256, 512, None)  # pixels, until one is accepted
NUM_FRAMES = 9  # 4k + 1 and 8k + 1
# Enough that both of Wan2.2's experts have their turn with every published shift.
NUM_STEPS = 4
NUM_COMPARED = 2  # calls of each network: those of both branches of the guidance


class SelfTestFailed(Exception):
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
    results: dict[str, MergeRule | str] = dict.fromkeys(candidates, "it was not called")
    try:
        _run_in_step(make_calls(pipeline, copied), candidates, results)
    except SelfTestFailed as exc:
        results = dict.fromkeys(candidates, str(exc))
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


def make_calls(pipeline: Any, copied: CopiedPipeline) -> list[SuspendedCall]:
    """One call for each of ``PROMPTS``, at its first network, of the smallest size that is accepted.

    Raises:
        SelfTestFailed: none is.
    """
    reason = "no size was accepted"
    for side in SIDES:
        calls = []
        try:
            for index in range(len(PROMPTS)):
                arguments = pipeline_arguments(pipeline, make_request(pipeline, index, side))
                # To the first denoiser call and back: only there has all been checked that depends on the size.
                probe = SuspendedCall(copied, arguments)
                try:
                    _run_until_denoiser(probe)
                finally:
                    probe.cancel()
                arguments = pipeline_arguments(pipeline, make_request(pipeline, index, side))
                calls.append(SuspendedCall(copied, arguments))
        except (SelfTestFailed, InvalidRequest) as exc:
            reason = f"no inputs could be made for the test: {exc}"
            continue
        return calls
    raise SelfTestFailed(reason)


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
    params = DiffusionParams(seed=index, **{name: value for name, value in values.items() if name in accepted})
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


def _run_until_denoiser(call: SuspendedCall) -> None:
    pending = call.resume()
    while pending is not None and not pending.is_denoiser:
        pending = call.resume(pending.run())
    if call.error is not None:
        raise SelfTestFailed(f"{type(call.error).__name__}: {call.error}")


def _run_in_step(
    calls: Sequence[SuspendedCall], candidates: Mapping[str, MergeRule], results: dict[str, MergeRule | str]
) -> None:
    compared = dict.fromkeys(candidates, 0)
    fingerprints = Fingerprints()
    try:
        pending = [call.resume() for call in calls]
        while any(pending):
            waiting = [one for one in pending if one is not None]
            outputs = [one.run() for one in waiting]
            component = waiting[0].component
            if component in candidates and compared[component] < NUM_COMPARED and len(waiting) == len(calls):
                compared[component] += 1
                rule = results[component]
                if compared[component] == 1:
                    results[component] = _find_rule(waiting, outputs, candidates[component], fingerprints)
                elif isinstance(rule, MergeRule):
                    results[component] = _find_rule(waiting, outputs, rule, fingerprints)
            for call, output in zip([call for call in calls if not call.has_ended], outputs, strict=True):
                call.resume(output)
            for call in calls:
                if call.error is not None:
                    raise SelfTestFailed(f"the test's request failed: {type(call.error).__name__}: {call.error}")
            pending = [call.pending for call in calls]
    finally:
        for call in calls:
            call.cancel()


def _find_rule(
    calls: Sequence[PendingCall], outputs: Sequence[Any], rule: MergeRule, fingerprints: Fingerprints
) -> MergeRule | str:
    """``rule``; or, if it does not hold, the same without padding; or why neither does."""
    try:
        compare(calls, outputs, rule, fingerprints)
    except Exception as exc:
        if not rule.padded:
            return f"{type(exc).__name__}: {exc}" if not isinstance(exc, SelfTestFailed) else str(exc)
        try:
            compare(calls[:2], outputs[:2], rule.without_padding(), fingerprints)
        except Exception:
            return str(exc)
        return rule.without_padding()
    return rule


def compare(calls: Sequence[PendingCall], outputs: Sequence[Any], rule: MergeRule, fingerprints: Fingerprints) -> None:
    """Merge ``calls`` and hold what comes out against ``outputs``, which each gave alone.

    Raises:
        SelfTestFailed: they differ, or the calls do not go together.
    """
    keys = {group_key(call, rule, fingerprints) for call in calls}
    if len(keys) != 1:
        raise SelfTestFailed("calls of the same shape do not go together")
    merged, counts = merge(calls, rule)
    call = calls[0]
    function: Callable[..., Any] = call.module if call.method == "forward" else getattr(call.module, call.method)
    for one, alone in zip(split(function(**merged), calls, counts, rule), outputs, strict=True):
        for ours, theirs in zip(tensors_of(one), tensors_of(alone), strict=True):
            difference = relative_difference(ours, theirs)
            allowed = TOLERANCES.get(theirs.dtype, 0.0)
            if not difference <= allowed:
                raise SelfTestFailed(
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
