"""A front end in a process of its own: answers once, says so in a line of JSON, and waits for the end of its input.

Its arguments: the checkpoint, HOST:PORT where hosts join, the token file.
"""

import json
import sys
import time

from tests.hosts.deployments import SMALL, answer
from vllm_omni import OmniLLM

if __name__ == "__main__":
    checkpoint, listen, token = sys.argv[1:]
    with OmniLLM(
        checkpoint, stage_overrides=["talker.host=box-b"], listen=listen, token_file=token, log_stats=True, **SMALL
    ) as omni:
        output = omni.run(answer(omni, 0))
        engine = omni.engine.orchestrator.engines["talker"]
        while not engine.pids():
            time.sleep(0.05)
        audio = output.multimodal_output["audio"]
        said = {"ids": list(output.outputs[0].token_ids), "sound": float(audio.sum()), "pids": engine.pids()}
        print(json.dumps(said), flush=True)
        sys.stdin.read()
