"""What the documents name is there."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.documents import read_blocks
from vllm_omni import envs

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])


def test_the_program_of_the_control_flow_guide_runs() -> None:
    blocks = [block.text for block in read_blocks(ROOT / "docs" / "control_flow.md") if block.language == "python"]
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", "\n".join(blocks)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(document: Path) -> None:
    links = re.findall(r"\]\((?!https?:)([^)#]+)", document.read_text())
    assert [link for link in links if not (document.parent / link).exists()] == []


def test_environment_variables_that_are_named_exist() -> None:
    named = {name for document in DOCUMENTS for name in re.findall(r"\bVLLM_OMNI_[A-Z_]+[A-Z]\b", document.read_text())}
    assert named - envs.VARIABLES.keys() == set()


def test_anchors_of_the_guides_exist() -> None:
    missing = []
    for document in DOCUMENTS:
        for path, anchor in re.findall(r"\]\((?!https?:)([^)#]*)#([^)]+)\)", document.read_text()):
            text = (document.parent / path if path else document).read_text()
            titles = re.findall(r"^#+ (.+)$", text, flags=re.MULTILINE)
            slugs = {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}
            if anchor not in slugs:
                missing.append(f"{document.name}: {path}#{anchor}")
    assert missing == []


def test_the_paper_map_names_modules_and_tests_that_exist() -> None:
    missing = []
    for line in (ROOT / "docs" / "paper_map.md").read_text().splitlines():
        if not line.startswith("| ") or line.startswith(("| source", "|---")):
            continue
        *_, modules, tests, _ = line.split("|")
        for cell, root in ((modules, ROOT / "vllm_omni"), (tests, ROOT)):
            directory = root
            for name in re.findall(r"`([^`]+)`", cell):
                # In one cell, a name without a directory may lie beside the one before it.
                found = [path / name for path in (root, directory, root / "model_executor") if (path / name).exists()]
                if found:
                    directory = found[0].parent
                else:
                    missing.append(name)
    assert missing == []
