"""A conversation on two replicas with a pool: it stays where its pages are, and continues elsewhere, or in the next
server, with the pages of the pool. Answers are those of one engine without a pool.
"""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import REGISTRY

from tests.e2e.engines import MARKS, greedy
from tests.e2e.test_kv_pool import ENGINE, Answer, Pool
from vllm_omni import OmniLLM
from vllm_omni.engine.replicas import ReplicaGroup
from vllm_omni.messages.outputs import collect
from vllm_omni.process.status import StageState

pytestmark = [*MARKS, pytest.mark.timeout(400), pytest.mark.long]  # units: tests/epd/test_router.py

REPLICAS = {"stage_overrides": ("language.replicas=2", "language.balance=affinity"), "log_stats": True}
START, ADDED = list(range(10, 110)), list(range(10, 34))


def group_of(omni: OmniLLM) -> ReplicaGroup:
    group = omni.engine.orchestrator.nodes["language"]
    assert isinstance(group, ReplicaGroup)
    return group


class Conversation:
    """Turns whose prompts have the earlier replies; those of another number share no page with them."""

    def __init__(self, number: int = 0) -> None:
        self.ids = [*START[number:], *START[:number]]
        self.session_id = f"s{number}"

    def ask(self, omni: OmniLLM) -> Answer:
        prompt = {"prompt_token_ids": self.ids}
        output = omni.run(collect(omni.engine.generate(prompt, greedy(), session_id=self.session_id)))
        answer = Answer(list(output.outputs[0].token_ids), output.num_cached_tokens or 0)
        self.ids = [*self.ids, *answer.ids, *ADDED]
        return answer


def homes(omni: OmniLLM) -> dict[str, int]:
    return dict(group_of(omni).router.statistics().num_tasks)


def pool_hits() -> float:
    """Pages that engines of this process have read from pools."""
    samples = (sample for metric in REGISTRY.collect() for sample in metric.samples)
    return sum(sample.value for sample in samples if sample.name == "vllm:kv_pool_hits_total")


def wait_until(condition: Callable[[], bool], timeout_s: float = 120.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_conversation_continues_on_another_replica_and_in_the_next_server(
    llava_checkpoint: Path, tmp_path: Path
) -> None:
    with OmniLLM(llava_checkpoint, **ENGINE) as omni:
        plain = Conversation()
        expected = [plain.ask(omni).ids for _ in range(4)]
    pool = Pool(tmp_path, llava_checkpoint)
    more: dict[str, Any] = REPLICAS
    with pool.engine(**more) as omni:
        conversation = Conversation()
        answers = [conversation.ask(omni) for _ in range(2)]
        assert answers[1].num_cached >= 96
        ((home, num_tasks),) = homes(omni).items()
        assert num_tasks == 2
        assert group_of(omni).router.statistics().num_chosen == {"load": 1, "pages": 1}

        engine = group_of(omni).engines[home]
        engine.kill()
        wait_until(lambda: engine.has_died)
        answers.append(conversation.ask(omni))
        assert answers[2].num_cached >= 96  # this replica has computed nothing of it
        (other,) = homes(omni).keys() - {home}

        wait_until(lambda: engine.current_status().state is StageState.RUNNING)
        earlier = list(conversation.ids)
        answers.append(conversation.ask(omni))
        assert homes(omni) == {home: 2, other: 2}  # it stays where its pages are now
        assert answers[3].num_cached >= 128
        wait_until(lambda: pool_hits() >= 3, 20.0)
        assert not any(group_of(omni).router.statistics().work.values())
    assert [answer.ids for answer in answers] == expected
    with pool.engine(**more) as omni:
        conversation.ids = earlier
        again = conversation.ask(omni)
        assert again.ids == expected[3] and again.num_cached >= 128
