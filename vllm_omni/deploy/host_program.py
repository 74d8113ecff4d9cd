"""The program that an actor starts on its node: ``serve_stages``, tied to the actor's life.

A process of its own, because Ray's changes to an actor's environment and signals are not for engines. Its first line of
input is the ``Work``, secret included: that is on no disk, in no command line and in no environment. The input ends
with the actor, and the program with it.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from typing import NoReturn

from vllm_omni.deploy.headless import serve_stages
from vllm_omni.deploy.ray_messages import Outcome, Work, decode, encode, take_stdout
from vllm_omni.errors import ConfigError, MissingDependency, OmniError
from vllm_omni.process.logs import enter_front_end

END_TIMEOUT_S = 30.0  # for the engines, once the actor has ended; they end with this process at the latest


def main() -> None:
    answers = take_stdout()
    work: Work = decode(sys.stdin.buffer.readline(), Work)
    signal.signal(signal.SIGTERM, _end)
    threading.Thread(target=_end_with_actor, daemon=True).start()
    enter_front_end()
    answers.write(encode(_run(work)) + b"\n")


def _run(work: Work) -> Outcome:
    try:
        serve_stages(work.model, work.stages, work.join, _secret_file(work.secret), revision=work.revision)
    except (ConfigError, MissingDependency) as exc:
        return Outcome(work.host, str(exc), is_rejected=True)
    except OmniError as exc:
        return Outcome(work.host, str(exc))
    return Outcome(work.host, "")


def _secret_file(secret: bytes) -> str:
    """A file without a name; this user's processes can open it as long as this one lives, as the engines do."""
    file = os.memfd_create("vllm-omni-secret")
    os.fchmod(file, 0o600)
    os.write(file, secret)
    return f"/proc/{os.getpid()}/fd/{file}"


def _end_with_actor() -> None:
    while os.read(sys.stdin.fileno(), 1):  # a buffer's lock, held in a daemon thread, would abort the interpreter's end
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    threading.Event().wait(END_TIMEOUT_S)
    os._exit(1)


def _end(*_: object) -> NoReturn:
    raise SystemExit(0)


if __name__ == "__main__":
    main()
