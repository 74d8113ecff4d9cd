"""The weights that engines of a server share: by which key, and on which device."""

from pathlib import Path
from typing import Any

import pytest
from vllm.config import VllmConfig

from tests.cases import rejected
from vllm_omni.config import load_config
from vllm_omni.engine.orchestrator import Orchestrator
from vllm_omni.errors import ConfigError
from vllm_omni.model_executor.host_weights import HostWeights
from vllm_omni.model_executor.shared_weights import shared_weights, weights_key
from vllm_omni.process.run_directory import RunDirectory
from vllm_omni.process.tether import ServerTether
from vllm_omni.testing import qwen2_5_omni


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return qwen2_5_omni.build(tmp_path_factory.mktemp("checkpoint"))


def configs(model: Path, *stage_overrides: str, **flags: Any) -> dict[str, VllmConfig]:
    flags = {"dtype": "float32", "max_model_len": 512, "enforce_eager": True, **flags}
    orchestrator = Orchestrator(load_config(model, stage_overrides=stage_overrides, **flags))
    engines = [engine for stage in orchestrator.config.stages for engine in orchestrator.maker.make_node(stage)[0]]
    return {engine.name: engine.vllm_config for engine in engines}


def keys(model: Path, *stage_overrides: str, **flags: Any) -> dict[str, str]:
    return {name: weights_key(config) for name, config in configs(model, *stage_overrides, **flags).items()}


def test_replicas_have_one_key_and_other_stages_have_others(checkpoint: Path) -> None:
    found = keys(checkpoint, "thinker.replicas=2", "thinker.max_num_seqs=3", load_format="omni_shared")
    assert found["thinker/0"] == found["thinker/1"]
    assert len(set(found.values())) == 3
    assert keys(checkpoint, load_format="omni_shared")["thinker"] == found["thinker/0"], (
        "limits of batches do not count"
    )


def test_what_changes_the_bytes_changes_the_key(checkpoint: Path, tmp_path: Path) -> None:
    plain = keys(checkpoint)
    tuned = keys(qwen2_5_omni.build(tmp_path / "tuned", seed=1))
    assert all(plain[name] != tuned[name] for name in plain)
    for change in ({"dtype": "bfloat16"}, {"max_model_len": 256}, {"tensor_parallel_size": 2}):
        assert keys(checkpoint, **change)["thinker"] != plain["thinker"]


def test_ranks_have_keys_of_their_own(checkpoint: Path) -> None:
    config = configs(checkpoint, tensor_parallel_size=2)["thinker"]
    first = weights_key(config)
    config.parallel_config.rank = 1
    assert weights_key(config) != first


def test_an_engine_without_a_server_cannot_share(checkpoint: Path) -> None:
    config = configs(checkpoint)["thinker"]
    with rejected(ConfigError, "engines of one server share weights, and this one has none", "no tether"):
        shared_weights(config)
    directory = RunDirectory()
    config.additional_config = ServerTether(directory.path, "thinker")
    weights = shared_weights(config)
    assert isinstance(weights, HostWeights)
    assert weights.path.name == f"{directory.path.name}-weights-{weights_key(config)}"
    directory.remove()
