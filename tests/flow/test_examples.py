"""The example pipelines, in tests' runtimes and as programs."""

import asyncio
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

from tests.flow.builders import over_every_link, read_payloads

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"

CASES = {
    "qwen_omni": [({"prompt": "hello there"}, {"text": ["hello", "there"], "audio": [6, 7, 7]})],
    "interleaved": [
        (
            {"message": ["Draw", "cat.png", "with a hat, will you?"]},
            {
                "tokens": ["e(Draw)", "vit(cat.png)", "vae(cat.png)", "e(with a hat, will you?)"],
                "image": ["image-of-latents[4]"],
            },
        )
    ],
    "hunyuan_image": [
        ({"message": ["a fox"]}, {"image": ["image[e(a fox)+0]"]}),
        (
            {"message": ["both", "a.png", "b.png"]},
            {"image": ["image[e(both)+vit(a.png)+vit(b.png)+vae(a.png)+vae(b.png)+2]"]},
        ),
    ],
    "longcat_next": [
        (
            {"prompt": "h"},
            {
                "text": ["t(h0)", "t(h1)", "t(h2)", "t(h3)"],
                "image_codes": [f"i(h{step})-{k}" for step in range(4) for k in range(2)],
                "audio": ["wave[3]"] * 4,
            },
        )
    ],
    "prefill_decode": [({"prompt": "so it goes"}, {"tokens": ["so", "it", "goes"]})],
    "agent": [
        (
            {"question": "who knows"},
            {"answer": ["round 0: who knows", "round 1: [who] [knows]", "round 2: [[who]] [[knows]]"]},
        )
    ],
    "speculative": [({"prompt": "hello"}, {"text": ["small says hello"]})],
}


@pytest.fixture
def load(monkeypatch):
    """Import a module of ``examples/graphs`` as from its own directory.

    For one test: a pipeline in ``examples`` has the name of one of them.
    """
    monkeypatch.syspath_prepend(str(EXAMPLES / "graphs"))
    known = set(sys.modules)
    yield importlib.import_module
    for name in sys.modules.keys() - known:
        if Path(getattr(sys.modules[name], "__file__", None) or "").parent == EXAMPLES / "graphs":
            del sys.modules[name]


def test_every_example_has_a_case():
    files = {path.stem for path in (EXAMPLES / "graphs").glob("*.py")} - {"standins"}
    assert files == set(CASES)


@pytest.mark.parametrize("name", CASES)
async def test_example_gives_its_outputs_in_order(load, make_runtime, name):
    example = load(name)
    runtime = make_runtime(example.graph, example.make_nodes())
    for inputs, expected in CASES[name]:
        got = await read_payloads(runtime.open("c", inputs, set(expected)))
        assert {field: [one for one in payloads if one is not None] for field, payloads in got.items()} == expected


@over_every_link
async def test_example_runs_over_sockets(load, make_runtime):
    example = load("longcat_next")
    ((inputs, expected),) = CASES["longcat_next"]
    runtime = make_runtime(example.graph, example.make_nodes())
    assert await read_payloads(runtime.open("c", inputs, set(expected))) == expected


@over_every_link
async def test_slower_of_two_models_is_cancelled(load, make_runtime):
    example = load("speculative")
    nodes = example.make_nodes()
    await read_payloads(make_runtime(example.graph, nodes).open("c", {"prompt": "x"}, {"text"}))
    while nodes["large"].state == "running":  # noqa: ASYNC110 - over a link it hears of it a little later
        await asyncio.sleep(0.001)


@pytest.mark.parametrize(
    "program",
    [*(EXAMPLES / "graphs" / f"{name}.py" for name in CASES), EXAMPLES / "custom_graph.py"],
    ids=lambda path: path.stem,
)
def test_program_runs(program):
    done = subprocess.run([sys.executable, str(program)], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout


def test_custom_graph_takes_less_than_forty_lines():
    assert len((EXAMPLES / "custom_graph.py").read_text().splitlines()) < 40
