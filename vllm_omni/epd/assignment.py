"""Which instances may take a request's next tasks, and how much work these are.

From: HydraInfer, sections 4.1 (instances of encode, prefill, decode and of any mix) and 4.4 (a request's tasks).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from vllm_omni.config.epd import REPLIES, Tasks
from vllm_omni.epd.cost import CostModel, LanguageLoad

NUM_TOKENS_UNKNOWN = 256
"""Assumed length of a reply for which the request sets no limit, or a higher one."""


class Candidate(NamedTuple):
    """An instance, and the tasks of a request that it would do next; the rest is for another instance."""

    instance: str
    tasks: Tasks


def find_candidates(todo: Tasks, kinds: Mapping[str, Tasks], *, keeps_together: bool = False) -> list[Candidate]:
    """Find the instances made for a request's next task or, if there are none, those that can do it as well.

    An instance with the language model computes whatever it was not given: a decode instance prefills, a prefill
    instance encodes.

    Args:
        todo: EPD, PD (the prompt is text, or the embeddings of its images exist) or D (the KV cache exists); with G in
            the place of D for a reply that only some instances generate.
        kinds: instance -> kind, of those that run.
        keeps_together: prefill and reply stay on one instance.
    """
    # Once for each kind, not for each instance: most of a choice among many replicas would be operations on flags.
    tasks_of = {kind: _tasks_for(kind, todo, keeps_together) for kind in set(kinds.values())}
    found = [Candidate(name, tasks_of[kind]) for name, kind in kinds.items()]
    found = found if all(tasks_of.values()) else [one for one in found if one.tasks]
    if found:
        return found
    first = todo.first
    if rest := todo & ~first:
        return [
            Candidate(name, first | tasks)
            for name, tasks in find_candidates(rest, kinds, keeps_together=keeps_together)
        ]
    return [Candidate(name, todo) for name, kind in kinds.items() if kind != Tasks.E]


def _tasks_for(kind: Tasks, todo: Tasks, keeps_together: bool) -> Tasks:
    if todo.first == Tasks.E and Tasks.P not in kind:
        return kind & Tasks.E  # an ED instance does not prefill, so its decode comes later
    tasks = todo.leading(kind)
    return Tasks(0) if keeps_together and Tasks.P in tasks and not tasks & REPLIES else tasks


class RequestSize(NamedTuple):
    """The size of a request, as far as it is known before the request runs."""

    num_embeds: int  # of its images
    num_prompt_tokens: int
    num_reply_tokens: int

    @classmethod
    def of(cls, prompt: Mapping[str, Any], max_tokens: int | None, num_replies: int = 1) -> RequestSize:
        """Measure a rendered prompt."""
        num_reply_tokens = min(max_tokens or NUM_TOKENS_UNKNOWN, NUM_TOKENS_UNKNOWN) * num_replies
        num_embeds = sum(
            place.get_num_embeds() for places in prompt.get("mm_placeholders", {}).values() for place in places
        )
        return cls(num_embeds, len(prompt.get("prompt_token_ids") or ()), num_reply_tokens)

    def work(self, tasks: Tasks, cost: CostModel | None, num_cached: int = 0) -> float:
        """Estimate the work of these tasks: seconds by a cost model; without one, tokens plus embeddings.

        Args:
            num_cached: tokens of the prompt that are not computed; of an encode alone, embeddings.
        """
        encode = self.num_embeds if Tasks.E in tasks else 0
        prefill = max(self.num_prompt_tokens - num_cached, 0) if Tasks.P in tasks else 0
        if Tasks.P not in tasks:
            encode = max(encode - num_cached, 0)
        decode = self.num_reply_tokens if tasks & REPLIES else 0
        if cost is None:
            return float(encode + prefill + decode)
        work = cost.images_s(encode)
        if prefill:
            work += cost.language_s(LanguageLoad().with_prefill(prefill, 0))
        context = self.num_prompt_tokens + decode // 2
        return work + decode * (cost.decode_s + cost.decode_context_s * context)
