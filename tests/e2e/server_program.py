"""A user's program around ``OmniLLM``, run by ``test_lifecycle.py``.

    python server_program.py MODEL SCENARIO [STAGE_OVERRIDE...]

It reports its progress in lines that start with EVENT, and waits for a line of input where the test examines it first.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

EVENT = "event: "
PROMPT = "Tell me a story."


def report(event: str) -> None:
    print(f"{EVENT}{event}", flush=True)


def report_pids(omni: Any, life: int) -> None:
    for name, engine in omni.engine.orchestrator.engines.items():
        (process,) = engine.llm.engine_core.resources.engine_manager.processes
        report(f"{name} has pid {process.pid}, life {life}")


def main(model: str, scenario: str, overrides: list[str]) -> None:
    # A program started in the background of a shell ignores Ctrl-C unless it says otherwise.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    from vllm_omni import DiffusionParams, OmniLLM
    from vllm_omni.errors import StageFailed

    # Each of these has one stage, and else there are three.
    draws = Path(model, "model_index.json").exists()
    reads = not draws and json.loads(Path(model, "config.json").read_text())["model_type"] == "llava"
    length = 512 if reads else 2048
    small = {} if draws else {"enforce_eager": True, "max_model_len": length, "skip_mm_profiling": True}
    report("starting")
    try:
        omni = OmniLLM(model, stage_overrides=overrides, dtype="float32", **small)
    except StageFailed as exc:
        report(f"{exc.stage} failed: {exc}")
        sys.stdin.readline()
        return
    report_pids(omni, 1)

    def generate(num_tokens: int = 4) -> None:
        params: Any
        if draws:
            params = DiffusionParams(height=64, width=64, num_inference_steps=num_tokens)
        elif reads:
            params = {"language": {"max_tokens": num_tokens, "ignore_eos": True}}
        else:
            params = {"thinker": {"max_tokens": num_tokens}, "talker": {"max_tokens": 2 * num_tokens}}
        omni.generate([PROMPT] * 4, params, use_tqdm=False)

    generate()
    match scenario:
        case "close":
            try:
                with omni:
                    raise ArithmeticError
            except ArithmeticError:
                report("closed after the user's own ArithmeticError")
            omni.close()
            sys.stdin.readline()
        case "close a stuck stage":
            for engine in omni.engine.orchestrator.engines.values():
                for pid in engine.pids():
                    os.kill(pid, signal.SIGSTOP)
            report("stuck")
            omni.close()
            report("closed")
            sys.stdin.readline()
        case "leave":
            report("leaving")
        case "generate":
            report("generating")
            while True:
                generate(num_tokens=400)
        case "lose a stage":
            report("generating")
            try:
                while True:
                    generate(num_tokens=400)
            except StageFailed as exc:
                report(f"request failed: {exc}")
            try:
                omni.run(omni.engine.check_health())
            except StageFailed as exc:
                report(f"unhealthy: {exc}")
            (engine,) = omni.engine.orchestrator.engines.values()
            while omni.engine.errored or not engine.current_status().num_restarts:
                time.sleep(0.05)
            generate()
            report_pids(omni, 2)
            omni.close()
            report("closed")
            sys.stdin.readline()
        case _:
            raise ValueError(scenario)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3:])
