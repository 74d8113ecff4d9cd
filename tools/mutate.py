"""Change one operator at a time and count how many of the changes a room's tests notice.

    python tools/mutate.py                                    50 mutants over flow, relay, schedulers and kv
    python tools/mutate.py --rooms flow kv --number 20
    python tools/mutate.py --also-in OTHER_CHECKOUT           only statements that stand in the other checkout as well

A mutant is chosen by a hash of its statement, its operator and ``--seed``, not by its place: two checkouts in which the
same statements stand in other files get the same mutants, so that ``--also-in`` compares two states of the tests. Tests
named after the mutated file run first, then the rest of the room's tests. A failure counts if the test passes without
the mutant; a test that fails without one is left out from then on, and reported.

The checkout is copied to a temporary directory and mutated there. Prints a line for each mutant and one line of JSON.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from copy import deepcopy
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
# Name -> places in the package, folders of tests. What a checkout does not have is left out.
ROOMS = {
    "flow": (["flow"], ["tests/flow"]),
    "relay": (["relay", "messages/payload.py"], ["tests/relay", "tests/contract"]),
    "sched": (["core/sched", "epd"], ["tests/core", "tests/epd"]),
    "kv": (["kv"], ["tests/kv"]),
    "deploy": (["deploy"], ["tests/deploy"]),
}
SWAPS: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Add: ast.Sub, ast.Sub: ast.Add,
    ast.And: ast.Or, ast.Or: ast.And,
}  # fmt: skip
TIMEOUT_S = 900.0  # for the tests of one mutant; a mutant that hangs is noticed
HANGS = "hangs"  # in the place of a test's name


class Mutant(NamedTuple):
    path: str  # within the checkout
    line: int  # of the statement
    column: int
    statement: str  # as it was, without its body
    index: int  # of the mutated expression among those of the statement
    change: str

    def rank(self, seed: int) -> str:
        return hashlib.sha256(f"{seed} {self.statement} {self.index} {self.change}".encode()).hexdigest()

    def source(self, checkout: Path) -> str:
        """The whole file, mutated."""
        tree = ast.parse((checkout / self.path).read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            if isinstance(node, ast.stmt) and (node.lineno, node.col_offset) == (self.line, self.column):
                apply(list(expressions_of(node))[self.index])
                return ast.unparse(tree)
        raise AssertionError(f"{self.path}:{self.line}: no statement starts there")


def head_of(statement: ast.stmt) -> str:
    """The statement in one line; of one with a body, its head."""
    return ast.unparse(statement).partition("\n")[0]


def mutants_of(path: Path, root: Path) -> Iterator[Mutant]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    name = path.relative_to(root).as_posix()
    seen: set[ast.AST] = set()
    for function in ast.walk(tree):
        if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        for statement in ast.walk(function):
            if not isinstance(statement, ast.stmt) or statement is function or statement in seen:
                continue
            seen.add(statement)
            changes = [(index, changed(node)) for index, node in enumerate(expressions_of(statement))]
            head = head_of(statement) if any(change for _, change in changes) else ""
            for index, change in changes:
                if change is not None:
                    yield Mutant(name, statement.lineno, statement.col_offset, head, index, change)


def expressions_of(statement: ast.AST) -> Iterator[ast.AST]:
    """Expressions of a statement itself, without those of the statements in its body."""
    for child in ast.iter_child_nodes(statement):
        if not isinstance(child, ast.stmt | ast.ExceptHandler | ast.match_case):
            yield child
            yield from expressions_of(child)


def changed(node: ast.AST) -> str | None:
    """What ``apply`` would do; None: nothing."""
    is_candidate = isinstance(node, ast.Compare | ast.BinOp | ast.BoolOp | ast.Constant | ast.Call)
    return apply(deepcopy(node)) if is_candidate else None


def apply(node: ast.AST) -> str | None:
    """Mutate one node in place."""
    if isinstance(node, ast.Compare) and type(node.ops[0]) in SWAPS:
        return swap(node.ops, 0)
    if isinstance(node, ast.BinOp | ast.BoolOp) and type(node.op) in SWAPS:
        before = type(node.op)
        node.op = SWAPS[before]()  # type: ignore[assignment]
        return f"{before.__name__} -> {SWAPS[before].__name__}"
    if isinstance(node, ast.Constant) and type(node.value) is bool:
        node.value = not node.value
        return f"{not node.value} -> {node.value}"
    if isinstance(node, ast.Constant) and type(node.value) is int:
        node.value += 1
        return f"{node.value - 1} -> {node.value}"
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("min", "max"):
        before_name, node.func.id = node.func.id, "max" if node.func.id == "min" else "min"
        return f"{before_name} -> {node.func.id}"
    return None


def swap(operators: list[ast.cmpop], index: int) -> str:
    before = type(operators[index])
    operators[index] = SWAPS[before]()  # type: ignore[call-overload]
    return f"{before.__name__} -> {SWAPS[before].__name__}"


def all_mutants(root: Path, rooms: Sequence[str]) -> Iterator[tuple[str, Mutant]]:
    for room in rooms:
        for place in (root / "vllm_omni" / name for name in ROOMS[room][0]):
            files = sorted(place.rglob("*.py")) if place.is_dir() else [place] if place.exists() else []
            for file in files:
                yield from ((room, mutant) for mutant in mutants_of(file, root))


def choose(root: Path, rooms: Sequence[str], number: int, seed: int, also_in: Path | None) -> list[tuple[str, Mutant]]:
    """As many of each room, the lowest ranks first."""
    known = None
    if also_in is not None:
        known = {(mutant.statement, mutant.index, mutant.change) for _, mutant in all_mutants(also_in, rooms)}
    by_room: dict[str, dict[str, Mutant]] = {room: {} for room in rooms}
    for room, mutant in all_mutants(root, rooms):
        if known is None or (mutant.statement, mutant.index, mutant.change) in known:
            by_room[room].setdefault(mutant.rank(seed), mutant)
    chosen = []
    for index in range(number):
        room = rooms[index % len(rooms)]
        ranks = sorted(by_room[room])
        if index // len(rooms) < len(ranks):
            chosen.append((room, by_room[room][ranks[index // len(rooms)]]))
    return chosen


def is_noticed(checkout: Path, room: str, mutant: Mutant, unreliable: set[str]) -> bool:
    """Whether a test of the room fails with the mutant in place, and passes without it."""
    file = checkout / mutant.path
    before = file.read_text(encoding="utf-8")
    mutated = mutant.source(checkout)
    folders = existing(checkout, ROOMS[room][1])
    named = [
        str(path.relative_to(checkout)) for one in folders for path in (checkout / one).rglob(f"test_{file.stem}*")
    ]
    try:
        for tests in filter(None, (named, folders)):
            file.write_text(mutated, encoding="utf-8")
            failed = failing(checkout, tests, unreliable)
            file.write_text(before, encoding="utf-8")
            if failed and (failed == {HANGS} or not failing(checkout, sorted(failed), unreliable)):
                return True
            unreliable |= failed
        return False
    finally:
        file.write_text(before, encoding="utf-8")


def existing(checkout: Path, folders: Sequence[str]) -> list[str]:
    return [folder for folder in folders if (checkout / folder).is_dir()]


def failing(checkout: Path, tests: Sequence[str], unreliable: set[str], *, all_of_them: bool = False) -> set[str]:
    """Names of the tests that fail: the first one, or all of them; ``HANGS`` if they do not end."""
    environment = {**os.environ, "PYTHONPATH": str(checkout), "FUZZ": "0.02", "FUZZ_CASES": "100"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--timeout", "60"]
    has_long_tests = '"long:' in (checkout / "pyproject.toml").read_text(encoding="utf-8")
    command += ["-m", "not long"] if has_long_tests else []
    command += ["-rfE", *([] if all_of_them else ["-x"]), *(f"--deselect={name}" for name in sorted(unreliable))]
    try:
        done = subprocess.run(
            [*command, *tests], cwd=checkout, env=environment, capture_output=True, timeout=TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return {HANGS}
    names = re.findall(rb"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", done.stdout, re.MULTILINE)
    if not names and done.returncode not in (0, 5):  # 5: no test was chosen
        return {HANGS}  # a mutant that ends pytest itself
    return {name.decode() for name in names}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rooms", nargs="+", choices=ROOMS, default=list(ROOMS))
    parser.add_argument("--number", type=int, default=50)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--checkout", type=Path, default=ROOT, help="whose tests are judged (default: %(default)s)")
    parser.add_argument(
        "--also-in", type=Path, help="another checkout, in which each mutated statement must stand, too"
    )
    options = parser.parse_args()
    chosen = choose(options.checkout.resolve(), options.rooms, options.number, options.seed, options.also_in)
    num_noticed, survivors = 0, []
    with tempfile.TemporaryDirectory() as directory:
        copy = Path(directory) / "checkout"
        shutil.copytree(options.checkout, copy, ignore=shutil.ignore_patterns(".git", ".venv", "build", "__pycache__"))
        unreliable: set[str] = set()
        for room in options.rooms:  # otherwise every mutant is noticed
            unreliable |= failing(copy, existing(copy, ROOMS[room][1]), unreliable, all_of_them=True)
            if HANGS in unreliable:
                sys.exit(f"the tests of {room} do not end without a mutant")
        for room, mutant in chosen:
            started = time.monotonic()
            noticed = is_noticed(copy, room, mutant, unreliable)
            num_noticed += noticed
            what = f"{mutant.path}:{mutant.line}: {mutant.statement[:70]!r} [{mutant.change}]"
            if not noticed:
                survivors.append(what)
            print(f"{'noticed ' if noticed else 'SURVIVED'} {time.monotonic() - started:5.0f} s  {what}", flush=True)
    result = {"mutants": len(chosen), "noticed": num_noticed, "survivors": survivors, "unreliable": sorted(unreliable)}
    print(json.dumps(result))


if __name__ == "__main__":
    main()
