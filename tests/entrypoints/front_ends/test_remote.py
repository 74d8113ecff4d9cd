"""A front end knows its server as the process of the engines does, without engines of its own."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.entrypoints.front_ends.link_ends import Engines, connected
from vllm_omni.config import OmniConfig
from vllm_omni.config.layers import load_config
from vllm_omni.deploy.needs import place_here
from vllm_omni.engine.orchestrator import Orchestrator
from vllm_omni.entrypoints.front_ends.link import EngineLink
from vllm_omni.entrypoints.front_ends.messages import Status
from vllm_omni.entrypoints.front_ends.remote import RemoteOmni, RemoteOrchestrator
from vllm_omni.entrypoints.page.model import describe_model
from vllm_omni.errors import InvalidRequest, Overloaded, ShuttingDown, StageUnavailable
from vllm_omni.process.status import StageState, StageStatus

RUNNING = StageStatus()


@pytest.fixture(scope="module")
def config(tiny_checkpoint: Path) -> OmniConfig:
    return place_here(
        load_config(
            tiny_checkpoint,
            dtype="float32",
            enforce_eager=True,
            max_model_len=512,
            stage_overrides=["talker.max_num_queued_reqs=2", "token2wav.replicas=2"],
        )
    )


@pytest.fixture(scope="module")
def remote(config: OmniConfig) -> Iterator[RemoteOmni]:
    link = EngineLink(lambda _: None, lambda: None, lambda: (0, 0))
    names = ["thinker", "talker", "token2wav/0", "token2wav/1"]
    orchestrator = RemoteOrchestrator(config, link, dict.fromkeys(names, 500), ("generate",))
    yield RemoteOmni(orchestrator, link)
    orchestrator.hub.close()


def update(remote: RemoteOmni, engines: dict[str, StageStatus], limits: dict[str, tuple[int, int]]) -> None:
    assert isinstance(remote.orchestrator, RemoteOrchestrator)
    remote.orchestrator.update(Status(0, engines, limits))


def test_it_has_the_graphs_of_the_server_and_the_lengths_of_its_engines(remote: RemoteOmni, config: OmniConfig) -> None:
    local = Orchestrator(config)
    assert list(remote.orchestrator.models) == list(local.models)
    assert remote.orchestrator.modalities_of() == local.modalities_of()
    assert remote.model_config.max_model_len == 500
    assert [one["name"] for one in describe_model(remote, ["tiny"])["stages"]] == ["thinker", "talker", "token2wav"]
    local.hub.close()


def test_it_knows_the_state_of_each_engine_as_it_was_reported_last(remote: RemoteOmni) -> None:
    remote.check_available(["audio"])
    update(remote, {"token2wav/0": StageStatus(StageState.RESTARTING, "it died", 1)}, {})
    remote.check_available(["audio"])  # by the other replica
    assert remote.stage_report()["token2wav/0"].reason == "it died"
    update(remote, {"talker": StageStatus(StageState.RESTARTING, "it died", 1)}, {})
    remote.check_available(["text"])
    with pytest.raises(StageUnavailable, match="talker"):
        remote.check_available(["audio"])
    assert remote.is_running and not remote.errored
    update(remote, {"thinker": StageStatus(StageState.FAILED, "given up", 5)}, {})
    assert not remote.is_running and remote.errored
    update(remote, dict.fromkeys(["thinker", "talker", "token2wav/0"], RUNNING), {})
    remote.check_available(["audio"])


async def test_requests_of_all_front_ends_count_in_its_limits(config: OmniConfig) -> None:
    async with connected(Engines()) as ends:
        names = ["thinker", "talker", "token2wav/0", "token2wav/1"]
        remote = RemoteOmni(RemoteOrchestrator(config, ends.link, dict.fromkeys(names, 500), ("generate",)), ends.link)
        remote.check_available(["audio"])
        update(remote, {}, {"talker": (2, 7)})
        with pytest.raises(Overloaded, match="2 of at most 2") as raised:
            remote.check_available(["audio"])
        assert raised.value.retry_after_s == 7
        remote.check_available(["text"])
        update(remote, {}, {"talker": (1, 7)})
        remote.check_available(["audio"])
        remote.orchestrator.hub.close()
        await ends.link.forward("GET", "/", [], b"")  # behind what was sent before
        assert ends.engines.rejected == ["talker"]


async def test_requests_run_in_the_process_of_the_engines(config: OmniConfig) -> None:
    async with connected(Engines()) as ends:
        names = ["thinker", "talker", "token2wav/0", "token2wav/1"]
        remote = RemoteOmni(RemoteOrchestrator(config, ends.link, dict.fromkeys(names, 500), ("generate",)), ends.link)
        outputs: list[Any] = [one async for one in remote.generate("Hello", {"max_tokens": 3}, modalities=["text"])]
        assert len(outputs) == 3
        ((prompt, params, arguments),) = ends.engines.requests
        assert prompt == "Hello"
        assert params["thinker"].max_tokens == 3
        assert arguments["modalities"] == ["text"]
        with pytest.raises(InvalidRequest, match="temperatur"):
            remote.generate("Hello", {"temperatur": 1})
        await remote.orchestrator.aclose()
        with pytest.raises(ShuttingDown):
            remote.generate("Hello")
        remote.orchestrator.hub.close()
