"""The ring buffer of the player, block by block as the audio thread runs it."""

import random
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Page

BLOCK = 128  # frames, of the Web Audio API
PLAY = """async ([capacity, enough, steps]) => {
  const reports = (globalThis.reports = []); // the script is loaded once for all tests
  globalThis.AudioWorkletProcessor = class {
    constructor() {
      this.port = { postMessage: (report) => globalThis.reports.push(report) };
    }
  };
  globalThis.registerProcessor = (name, kind) => (globalThis.kind = kind);
  if (!globalThis.kind) await import("/omni/static/player-worklet.js");
  const player = new globalThis.kind({ processorOptions: { capacity, enough } });
  const played = [];
  let isAlive = true;
  for (const step of steps) {
    if (step === null) {
      const output = new Float32Array(128);
      isAlive = player.process([], [[output]]);
      played.push(...output);
    } else {
      player.port.onmessage({ data: Array.isArray(step) ? { samples: Float32Array.from(step) } : step });
    }
  }
  return { played, isAlive, report: reports.at(-1) };
}"""


def play(page: "Page", steps: list[Any], capacity: int = 700, enough: int = 200) -> Any:
    """Run steps: a list of samples or a message arrives, or (None) a block is played."""
    return page.evaluate(PLAY, [capacity, enough, steps])


@pytest.mark.parametrize("seed", range(5))
def test_pieces_of_any_size_are_played_one_behind_the_other(page: "Page", seed: int) -> None:
    rng = random.Random(seed)
    samples = list(range(1, 4001))  # exact in float32
    steps: list[Any] = []
    buffered = sent = 0
    while sent < len(samples):
        size = min(rng.randint(1, 300), len(samples) - sent, 700 - buffered)
        steps.append(samples[sent : sent + size])
        sent, buffered = sent + size, buffered + size
        while buffered >= 400:  # never empty: the buffer wraps around several times
            steps.append(None)
            buffered -= BLOCK
    made = play(page, [*steps, {"end": True}, *[None] * 8])
    assert made["played"][: len(samples)] == samples
    assert not any(made["played"][len(samples) :])
    assert made["report"] == {
        "played": len(samples),
        "gaps": 0,
        "silent": 0,
        "buffered": 0,
        "isPlaying": False,
        "isOver": True,
    }
    assert not made["isAlive"]


def test_it_waits_until_there_is_enough(page: "Page") -> None:
    made = play(page, [[1] * 199, None, [1], None])
    assert made["played"] == [0] * BLOCK + [1] * BLOCK


def test_a_late_piece_leaves_one_gap_of_which_no_sample_is_lost(page: "Page") -> None:
    steps: list[Any] = [[1] * 256, None, None, None, [2] * 256, None, None, {"end": True}, None]
    made = play(page, steps)
    assert made["played"] == [1] * 256 + [0] * BLOCK + [2] * 256 + [0] * BLOCK
    assert (made["report"]["gaps"], made["report"]["silent"]) == (1, BLOCK)


def test_the_end_of_a_short_sound_is_no_gap(page: "Page") -> None:
    made = play(page, [[1] * 50, {"end": True}, None, None])
    assert made["played"][:51] == [1] * 50 + [0]
    assert (made["report"]["played"], made["report"]["gaps"], made["report"]["isOver"]) == (50, 0, True)


def test_stop_ends_it_at_once(page: "Page") -> None:
    made = play(page, [[1] * 600, None, {"stop": True}, None])
    assert made["played"] == [1] * BLOCK + [0] * BLOCK
    assert made["report"]["isOver"] and not made["isAlive"]
