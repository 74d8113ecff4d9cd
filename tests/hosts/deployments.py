"""A front end in the test's process whose stages run on hosts of their own, and what tests ask of it."""

import asyncio
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from tests.e2e.engines import make_image
from tests.hosts import machines
from tests.hosts.machines import Network, network
from tests.reference.media import IMAGE
from vllm_omni import OmniLLM
from vllm_omni.messages.outputs import OmniRequestOutput, collect
from vllm_omni.process.status import StageState
from vllm_omni.relay.secret import MIN_BYTES

SMALL: dict[str, Any] = {"dtype": "float32", "enforce_eager": True, "max_model_len": 1024, "skip_mm_profiling": True}
PROMPT = "<|im_start|>user\nHello {}<|im_end|>\n<|im_start|>assistant\n"
PARAMS: dict[str, Any] = {
    "thinker": {"temperature": 0.0, "max_tokens": 24, "ignore_eos": True},
    "talker": {"temperature": 0.0, "max_tokens": 40},
    "token2wav": {"seed": 0},
}
NUM_REQUESTS = 4
PORT = 7654
TIMEOUT_S = 180.0
NOTICED_S = 30.0  # 3 s, on a machine that is busy with other tests
ORPHAN_S = 120.0  # a busy machine takes many seconds for what a test does between a cut and its end


class Deployment:
    """A front end in this process, and a host for each stage."""

    def __init__(
        self,
        net: Network,
        checkpoint: Path,
        token: Path,
        logs: Path,
        stages: Mapping[str, str],
        flags: Sequence[str] = (),
    ) -> None:
        self.net, self.checkpoint, self.token, self.logs, self.flags = net, checkpoint, token, logs, flags
        self.hosts = {stage: net.add() for stage in stages}
        self.omni: OmniLLM

    def log(self, stage: str) -> Path:
        return self.logs / f"{stage.replace('/', '-').replace(' ', '+')}.log"

    def join(
        self, stage: str, *, token: Path | None = None, log: Path | None = None, orphan_s: float | None = None
    ) -> Any:
        """Start the program of a stage's host, which ends after ``orphan_s`` without a front end."""
        command = [str(Path(sys.executable).with_name("vllm")), "serve", str(self.checkpoint), "--omni", "--headless"]
        command += [f"--stage={one}" for one in stage.split()]
        command += [f"--join={self.net.address}:{PORT}", f"--token-file={token or self.token}", *self.flags]
        return self.hosts[stage].start(command, log or self.log(stage), VLLM_OMNI_ORPHAN_S=str(orphan_s or ORPHAN_S))

    def status(self, stage: str) -> StageState:
        return self.omni.engine.stage_report()[stage].state

    def recovered(self) -> None:
        states = self.omni.engine.stage_report
        wait_for("all stages run", lambda: {one.state for one in states().values()} == {StageState.RUNNING})

    def ask_all(self) -> list[OmniRequestOutput]:
        async def ask() -> list[OmniRequestOutput]:
            return await asyncio.gather(*(answer(self.omni, number) for number in range(NUM_REQUESTS)))

        return self.omni.run(ask())


async def answer(omni: OmniLLM, number: int) -> OmniRequestOutput:
    return await collect(omni.engine.generate(PROMPT.format(number), PARAMS))


async def answer_to_image(omni: OmniLLM) -> OmniRequestOutput:
    prompt = {"prompt": PROMPT.format(IMAGE), "multi_modal_data": {"image": make_image(1)}}
    return await collect(omni.engine.generate(prompt, PARAMS))


def wait_for(what: str, is_true: Callable[[], object], timeout_s: float = TIMEOUT_S) -> None:
    deadline = time.monotonic() + timeout_s
    while not is_true():
        assert time.monotonic() < deadline, f"not within {timeout_s:g} s: {what}"
        time.sleep(0.05)


def assert_equal(answers: Sequence[OmniRequestOutput], expected: Sequence[OmniRequestOutput]) -> None:
    for one, other in zip(answers, expected, strict=True):
        assert one.outputs[0].token_ids == other.outputs[0].token_ids
        audio = one.multimodal_output["audio"]
        assert len(audio)  # its samples depend on what else is in a batch, by the order of sums
        largest = float(audio.abs().max())
        torch.testing.assert_close(audio, other.multimodal_output["audio"], rtol=0, atol=1e-4 * largest)


def answers_of_one_machine(checkpoint: Path) -> tuple[list[OmniRequestOutput], OmniRequestOutput]:
    """What every deployment is to answer: to ``ask_all``, and to ``answer_to_image``."""

    async def ask() -> list[OmniRequestOutput]:
        return await asyncio.gather(*(answer(omni, number) for number in range(NUM_REQUESTS)))

    with OmniLLM(checkpoint, **SMALL) as omni:
        return omni.run(ask()), omni.run(answer_to_image(omni))


@contextmanager
def deploy(
    checkpoint: Path,
    directory: Path,
    stages: Mapping[str, str],
    *overrides: str,
    hosts_dir: Path,
    flags: Sequence[str] = (),
    engine: Mapping[str, Any] = SMALL,
) -> Iterator[Deployment]:
    """Start a host for each of these engines, and the front end; all end.

    Args:
        directory: for logs and the secret.
        stages: name of an engine, or names of several with a space between -> their host in the deployment.
        hosts_dir: with a short path.
        flags: of each host's command, others than those by which it joins.
        engine: arguments of every engine, and others of ``OmniLLM``.
    """
    print(machines.why_not() or "hosts are network namespaces")
    token = directory / "token"
    token.write_text("s" * MIN_BYTES)
    token.chmod(0o600)
    with network(hosts_dir) as net:
        made = Deployment(net, checkpoint, token, directory, stages, flags)
        for stage in stages:  # before there is a front end
            made.join(stage)
        listen = {"listen": f"{net.address}:{PORT}", "token_file": str(token)}
        try:
            made.omni = OmniLLM(checkpoint, stage_overrides=overrides, **listen, **engine)
        except BaseException:
            print(*(f"{stage}: {made.log(stage).read_text()[-4000:]}" for stage in stages), sep="\n")
            raise
        with made.omni:
            yield made
            programs = [program for host in made.hosts.values() for program in host.running()]
        # A front end that ends ends its hosts.
        wait_for("the end of the hosts", lambda: all(host.has_ended() for host in made.hosts.values()))
        assert [program.returncode for program in programs] == [0] * len(made.hosts)
