"""``/metrics`` of several front ends is one: what each has counted is added to what the engines' process has."""

import os
import subprocess
import sys
from pathlib import Path

from prometheus_client import REGISTRY, Counter

from vllm_omni.entrypoints.front_ends.metrics import SharedMetrics

FRONT_END = """
import sys
from pathlib import Path
from prometheus_client import Counter
from vllm_omni.entrypoints.front_ends.host import share_metrics
share_metrics(Path(sys.argv[1]))
Counter("test_front_ends_requests", "Requests.", ["path"]).labels("/v1").inc(float(sys.argv[2]))
"""


def test_counters_of_front_ends_are_added_and_stay_when_one_has_ended(tmp_path: Path) -> None:
    shared = SharedMetrics(tmp_path)
    of_engines = Counter("test_front_ends_steps", "Steps.")
    both = Counter("test_front_ends_requests", "Requests.", ["path"])
    try:
        of_engines.inc(7)
        both.labels("/v1").inc(100)  # of HTTP requests that front ends have forwarded
        for number in ("2", "3"):
            subprocess.run([sys.executable, "-c", FRONT_END, str(shared.directory), number], check=True, env=os.environ)
        text = bytes(shared.show("").body).decode()
    finally:
        REGISTRY.unregister(of_engines)
        REGISTRY.unregister(both)
    assert "test_front_ends_steps_total 7.0" in text
    assert 'test_front_ends_requests_total{path="/v1"} 5.0' in text
    assert text.count("# TYPE test_front_ends_requests_total counter") == 1
