"""How a stage publishes, by the edges of its graph and the deployment; without engines."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import AutoConfig

from vllm_omni.config import OmniConfig, load_config
from vllm_omni.engine.kinds import ENGINE_KINDS
from vllm_omni.engine.relay_options import make_relay_options
from vllm_omni.errors import ConfigError
from vllm_omni.flow import GraphParser
from vllm_omni.model_executor.pipeline import find_pipeline_cls
from vllm_omni.relay.hub import UNTIL_RELEASED_FOR_ALL, RelayOptions
from vllm_omni.testing import qwen2_5_omni as tiny


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.build(tmp_path_factory.mktemp("checkpoint"))


def options_of(config: OmniConfig, stage: str, instance: object = None) -> RelayOptions:
    pipeline = find_pipeline_cls(config.model_type)(config.model, AutoConfig.from_pretrained(config.model))
    engine: Any = SimpleNamespace(
        name=stage,
        config=config.stage(stage),
        kind=ENGINE_KINDS[config.stage(stage).engine_type],
        spec=next(spec for spec in pipeline.stages if spec.name == stage),
        instance=instance,
        vllm_config=SimpleNamespace(device_config=SimpleNamespace(device_type="cpu")),
    )
    return make_relay_options(engine, [GraphParser(pipeline.graph).parse()], config, lambda _: 2)


def test_a_stage_publishes_for_each_rank_of_its_reader_or_for_the_user(model: Path) -> None:
    config = load_config(model)
    thinker = options_of(config, "thinker")
    assert (thinker.num_readers, thinker.stream, thinker.transport) == (2, True, "shm")
    assert options_of(config, "talker") == RelayOptions()  # it publishes token ids alone
    vocoder = options_of(config, "token2wav")
    assert (vocoder.num_readers, vocoder.stream) == (1, False)


def test_what_a_replica_may_have_to_read_again_stays(model: Path) -> None:
    replicas = ["talker.replicas=2", "thinker.replicas=2"]
    thinker = options_of(load_config(model, stage_overrides=replicas), "thinker", SimpleNamespace(kind=None))
    assert (thinker.num_readers, thinker.stream, thinker.transport) == (2, True, "shm")
    edges = {"edges": {"thinker->talker": {"stream": False}}}
    thinker = options_of(load_config(model, overrides=edges, stage_overrides=replicas), "thinker")
    assert (thinker.num_readers, thinker.stream) == (UNTIL_RELEASED_FOR_ALL, False)
    assert options_of(load_config(model, overrides=edges), "thinker").num_readers == 2


def test_an_instance_publishes_over_one_transport(model: Path) -> None:
    edges = {"thinker->talker": {"transport": "tcp"}}
    config = load_config(model, overrides={"edges": edges}, epd={"instances": {"P": 1, "D": 1}, "transport": "shm"})
    with pytest.raises(ConfigError, match=r"epd.transport = 'shm', but edge thinker->talker has 'tcp'"):
        options_of(config, "thinker", instance=SimpleNamespace(kind="P"))
