"""Instances of one rank and of two: caches go to more ranks than they come from, and to fewer."""

from pathlib import Path

import pytest

from tests.e2e.engines import MARKS, PATIENT, UPSTREAM, tokens_of, upstream_answers
from tests.e2e.test_epd_instances import ask_all, make_params, make_prompts, only
from vllm_omni import OmniLLM
from vllm_omni.engine.instances import InstanceGroup

pytestmark = [*MARKS, pytest.mark.long]


def test_instances_with_other_numbers_of_ranks_answer_as_one_engine_does(
    llava_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = make_prompts()
    expected = tokens_of(
        upstream_answers(llava_checkpoint, prompts, [make_params(number) for number in range(len(prompts))])
    )
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")  # vLLM compiles how it ranks the tokens of a prompt
    epd = {"instances": "E:1,P:1,D:1,PD:1", "engine_args": {"PD": {"tensor_parallel_size": 2}}, **PATIENT}
    with OmniLLM(llava_checkpoint, **UPSTREAM, epd=epd) as omni:
        group = omni.engine.orchestrator.nodes["language"]
        assert isinstance(group, InstanceGroup)
        for mix in ("E|PD=P|D", "E|P|PD=D"):  # from two ranks to one, and back
            before = group.statistics()
            with only(group, mix):
                assert ask_all(omni) == expected, mix
                assert ask_all(omni) == expected, f"{mix}, with its prefixes and images cached"
            after = group.statistics()
            assert after.num_migrations > before.num_migrations, mix
            assert after.num_redone == before.num_redone, mix
