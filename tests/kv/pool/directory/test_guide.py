from pathlib import Path

from tests.documents import read_blocks

GUIDE = Path(__file__).resolve().parents[4] / "docs" / "pool.md"


def test_the_program_of_the_guide_runs():
    program = "\n".join(block.text for block in read_blocks(GUIDE) if "MemoryDirectory" in block.text)
    assert "match_and_claim" in program
    exec(compile(program, str(GUIDE), "exec"), {})
