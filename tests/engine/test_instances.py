"""What a request of a stage with several instances leaves behind, however it ends. Engines: tests/e2e/test_epd_*.py."""

import asyncio
import gc
from collections.abc import AsyncGenerator, Callable
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.multimodal.inputs import PlaceholderRange
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import SamplingParams

from vllm_omni.config import StageConfig
from vllm_omni.config.epd import Instance
from vllm_omni.engine.instance_args import make_instances
from vllm_omni.engine.instances import InstanceGroup
from vllm_omni.engine.transfer_params import EC
from vllm_omni.errors import RelayBroken, StageFailed, StageUnavailable
from vllm_omni.messages.outputs import OmniRequestOutput
from vllm_omni.messages.payload import Payload, TensorRef, encode
from vllm_omni.messages.report import NodeReport, Reporter
from vllm_omni.model_executor.pipeline import RequestContext, StageRequest, StageSpec
from vllm_omni.process.status import StageState, StageStatus

IMAGES = {
    name: Payload(tensors={"rows": TensorRef("shm", (2, 4), "float32", name.encode(), lease)})
    for lease, name in enumerate(("cat", "dog"), 1)
}
Step = Callable[[], Any]


def output_of(**more: Any) -> OmniRequestOutput:
    completion = CompletionOutput(0, "a", [5], None, None, finish_reason="length")
    output = OmniRequestOutput.of(RequestOutput("id", None, [1], None, outputs=[completion], finished=True))
    vars(output).update(more)
    return output


class Engine:
    """One instance without an engine: an encode publishes both images; ``before`` runs before each output, ``after``
    behind it.
    """

    def __init__(self, instance: Instance) -> None:
        self.instance, self.name = instance, instance.name
        self.spec = StageSpec("s", "", "text")
        self.llm = SimpleNamespace(input_processor=SimpleNamespace(_get_mm_identifier=lambda name, adapter: name))
        self.status = StageStatus()
        self.before: Step | None = None
        self.after: Step | None = None
        self.prompts: list[list[int]] = []  # of its requests
        self.packed = {name: encode(payload) for name, payload in IMAGES.items()}
        self.num_running = self.num_requests = 0
        self.has_died = False

    def current_status(self) -> StageStatus:
        return self.status

    def termination_reason(self) -> str:
        return "its engine has died"

    async def prepare(self, request: StageRequest, *args: Any) -> tuple[Any, SamplingParams]:
        place = PlaceholderRange(offset=0, length=1)
        media: dict[str, Any] = {
            "mm_hashes": {"image": list(IMAGES)},
            "mm_kwargs": {"image": [None, None]},
            "mm_placeholders": {"image": [place, place]},
        }
        return {"prompt_token_ids": [1], **media}, SamplingParams(max_tokens=1)

    async def run(
        self, prompt: Any, params: SamplingParams, request_id: str, context: Any, report: Reporter
    ) -> AsyncGenerator[OmniRequestOutput, None]:
        self.num_running += 1
        self.prompts.append(prompt["prompt_token_ids"])
        try:
            if self.before is not None:
                await self.before()
            is_encode = (params.extra_args or {}).get(EC, {}).get("encode_only")
            yield output_of(ec_transfer_params={"images": self.packed}) if is_encode else output_of()
            if self.after is not None:
                await self.after()
        finally:
            await asyncio.sleep(0)  # the acknowledgement of an abort
            self.num_running -= 1
            if str(self.instance.kind) == "E":
                report(NodeReport("s", published=list(IMAGES.values())))


class Group(InstanceGroup):
    """Records the leases that it ends."""

    engines: Any

    def __init__(self, instances: str = "E:1,PD:1") -> None:
        config = StageConfig(stage_id=0, name="s", engine_type="ar", model="m", epd={"instances": instances})
        self.ended: list[Payload] = []
        hub: Any = SimpleNamespace(release_payload=lambda payload, for_all: self.ended.append(payload))
        engines: Any = [Engine(one) for one in make_instances(config)]
        super().__init__(config, engines, hub)

    async def ask(self) -> None:
        context = RequestContext("request", {}, {})
        async for _ in self.generate(StageRequest("look"), context, frozenset({"text"})):
            pass

    def holds_nothing(self) -> bool:
        """Every lease has ended, and once; no engine has the request, and no work is counted."""
        self.images.clear()
        is_free = not any(self.router.statistics().work.values())
        is_idle = not any(engine.num_running for engine in self.engines.values())
        return is_free and is_idle and self.ended in ([], list(IMAGES.values()), list(IMAGES.values())[::-1])


@pytest.fixture
async def group() -> Group:
    return Group()


async def test_a_request_that_ends_holds_nothing(group: Group) -> None:
    await group.ask()
    assert group.holds_nothing() and group.ended


@pytest.mark.parametrize("name", ["s/E0", "s/PD0"])
async def test_a_request_that_is_cancelled_within_a_task_holds_nothing(group: Group, name: str) -> None:
    reached = asyncio.Event()

    async def stay() -> None:
        reached.set()
        await asyncio.Event().wait()

    group.engines[name].before = stay
    asked = asyncio.create_task(group.ask())
    await reached.wait()
    asked.cancel()
    await asyncio.wait([asked])
    assert asked.cancelled() and group.holds_nothing() and group.ended


async def cancel_as_a_task_fails(group: Group) -> None:
    async def fail() -> None:
        loop = asyncio.get_running_loop()
        loop.call_soon(loop.call_soon, asked.cancel)  # when the task has ended, and the request has not noticed
        raise StageFailed("s/E0", "broken")

    group.engines["s/E0"].before = fail
    asked = asyncio.create_task(group.ask())
    await asyncio.wait([asked])
    assert asked.cancelled()
    group.engines["s/E0"].before = None  # the last reference to the task


async def test_a_request_that_is_cancelled_as_its_task_fails_holds_nothing_and_leaves_no_error(
    group: Group, caplog: pytest.LogCaptureFixture
) -> None:
    await cancel_as_a_task_fails(group)
    gc.collect()
    assert group.holds_nothing()
    assert "never retrieved" not in caplog.text


async def ask_until_no_instance_runs(group: Group) -> "asyncio.Task[None]":
    """A request whose images are encoded, and that waits for an instance to recover."""

    async def die() -> None:
        group.engines["s/PD0"].status = StageStatus(StageState.RESTARTING, "died")

    group.engines["s/E0"].before = die
    asked = asyncio.create_task(group.ask())
    for _ in range(20):
        await asyncio.sleep(0)
    assert group.router.statistics().num_tasks == {"s/E0": 1} and not group.engines["s/E0"].num_running
    return asked


async def test_a_request_that_is_cancelled_while_no_instance_runs_holds_nothing(group: Group) -> None:
    asked = await ask_until_no_instance_runs(group)
    asked.cancel()
    await asyncio.wait([asked])
    assert asked.cancelled() and group.holds_nothing() and group.ended


async def test_a_request_fails_at_once_when_the_last_instance_is_given_up(group: Group) -> None:
    asked = await ask_until_no_instance_runs(group)
    group.engines["s/PD0"].status = StageStatus(StageState.FAILED, "died")
    group._on_status()
    with pytest.raises(StageUnavailable, match="died"):
        await asked
    assert group.holds_nothing()


async def test_references_that_cannot_be_read_hold_nothing(group: Group) -> None:
    group.engines["s/E0"].packed["dog"] = b"?"
    with pytest.raises(RelayBroken):
        await group.ask()
    assert group.holds_nothing() and group.ended


async def test_the_prompt_of_a_resumed_reply_is_prefilled_with_the_tokens_that_the_user_has() -> None:
    """The instance that decodes would reject pages of a shorter prompt, and compute it all itself."""
    group = Group("EP:1,D:2")
    decoding = [group.engines["s/D0"], group.engines["s/D1"]]

    async def die() -> None:
        decoding[0].status = StageStatus(StageState.FAILED, "died")
        raise StageFailed("s/D0", "died")

    decoding[0].after = die
    await group.ask()
    assert group.engines["s/EP0"].prompts == [[1], [1, 5]]
    assert [engine.prompts for engine in decoding] == [[[1]], [[1, 5]]]


async def test_a_drained_instance_keeps_no_images_for_later_requests(group: Group) -> None:
    async def relay_statistics(timeout_s: float) -> list[Any]:
        return [{"shm": {"num_leases": len(IMAGES) - len(group.ended)}}]

    group.engines["s/E0"].relay_statistics = relay_statistics
    await group.ask()
    assert not group.ended  # they are kept
    assert await group.vacate("s/E0")
    assert group.ended == list(IMAGES.values())
