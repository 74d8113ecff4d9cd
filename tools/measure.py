"""Measure the structure of the package: files, functions, branches, imports between rooms, uses of others' privates.

    python tools/measure.py [PACKAGE]            a table
    python tools/measure.py --json [PACKAGE]     one line of JSON
    python tools/measure.py --check [PACKAGE]    exit 1 with a file over 500 lines or a cycle of imports between rooms

A *room* is a package, or a sub-package of one of the larger ones (``flow/graph``). The *branches* of a function are its
cyclomatic complexity: 1, and 1 for each ``if``, loop, comprehension, ``except``, ``case`` and conditional expression,
and for each operand of ``and`` and ``or`` after the first. A *private of another* is ``x._name`` where ``x`` is neither
``self`` nor ``cls``, in a file that neither defines nor assigns ``_name``. *Idiom lines* are lines of comments,
docstrings and strings with a word of ``IDIOM``.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import re
import statistics
import sys
import tokenize
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

MAX_FILE_LINES = 500
BRANCHES = (ast.If, ast.IfExp, ast.For, ast.AsyncFor, ast.While, ast.comprehension, ast.ExceptHandler, ast.match_case)
# Words that a reader who knows vLLM and diffusers has to decode; CONTRIBUTING.md says what to write instead.
IDIOM = re.compile(
    r"\b(who|whoever|whom|whose turn|nobody|somebody|any more|be it|begun|lets? go of|told|tells?|gives? way"
    r"|none of ours|goes? on|under way|puts? off|word for word|spared?s?|refuses?d?)\b",
    re.IGNORECASE,
)
Function = ast.FunctionDef | ast.AsyncFunctionDef

# Packages whose sub-packages are rooms of their own. ``tests/test_imports.py`` asserts the order of the packages.
LARGE_ROOMS = ("core", "entrypoints", "flow", "kv", "model_executor", "relay")


class FunctionSize(NamedTuple):
    where: str  # file:line name
    num_lines: int
    num_branches: int


class SourceFile:
    """One file of the package, parsed once."""

    def __init__(self, path: Path, package: Path) -> None:
        self.name = path.relative_to(package).as_posix()
        self.module = ".".join(path.relative_to(package.parent).with_suffix("").parts).removesuffix(".__init__")
        self.is_package = path.name == "__init__.py"
        text = path.read_text(encoding="utf-8")
        self.num_lines = text.count("\n")
        tokens = tokenize.generate_tokens(io.StringIO(text).readline)
        prose = [token.string for token in tokens if token.type in (tokenize.COMMENT, tokenize.STRING)]
        self.num_prose_lines = sum(1 for one in prose for line in one.splitlines() if line.strip(" \"'#"))
        self.num_idiom_lines = sum(1 for one in prose for line in one.splitlines() if IDIOM.search(line))
        self.num_code_lines = sum(1 for line in text.splitlines() if line.strip() and not line.strip().startswith("#"))
        self.tree = ast.parse(text)

    @property
    def room(self) -> str:
        parts = self.name.removesuffix(".py").split("/")
        if len(parts) == 1:
            return parts[0]
        return "/".join(parts[:2]) if parts[0] in LARGE_ROOMS and len(parts) > 2 else parts[0]

    def functions(self) -> Iterator[FunctionSize]:
        for node in ast.walk(self.tree):
            if isinstance(node, Function):
                num_lines = (node.end_lineno or node.lineno) - node.lineno + 1
                yield FunctionSize(f"{self.name}:{node.lineno} {node.name}", num_lines, count_branches(node))

    def imports(self) -> Iterator[str]:
        """Modules of the same package that this file imports when it runs; those for type checkers are left out."""
        top = self.module.partition(".")[0]
        for node in walk_run_time(self.tree):
            if isinstance(node, ast.Import):
                yield from (alias.name for alias in node.names if alias.name.partition(".")[0] == top)
            elif isinstance(node, ast.ImportFrom) and not node.level and (node.module or "").partition(".")[0] == top:
                yield from (f"{node.module}.{alias.name}" for alias in node.names)

    def privates_of_others(self) -> int:
        own = {node.name for node in ast.walk(self.tree) if isinstance(node, Function | ast.ClassDef)}
        uses = []
        for node in ast.walk(self.tree):
            if isinstance(node, ast.AnnAssign | ast.Assign):
                for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                    own |= {one.attr for one in ast.walk(target) if isinstance(one, ast.Attribute)}
                    own |= {one.id for one in ast.walk(target) if isinstance(one, ast.Name)}
            elif isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__"):
                is_own = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
                is_own |= isinstance(node.value, ast.Call) and ast.unparse(node.value) == "super()"
                if not is_own:
                    uses.append(node.attr)
        return sum(1 for name in uses if name not in own)


def walk_run_time(tree: ast.AST) -> Iterator[ast.AST]:
    """As ``ast.walk``, without the bodies of ``if TYPE_CHECKING``."""
    for child in ast.iter_child_nodes(tree):
        if isinstance(child, ast.If) and ast.unparse(child.test).endswith("TYPE_CHECKING"):
            continue
        yield child
        yield from walk_run_time(child)


def count_branches(function: Function) -> int:
    """Cyclomatic complexity: 1 for the straight way, and 1 for every way off it; inner functions count as well."""
    count = 1
    for node in ast.walk(function):
        count += isinstance(node, BRANCHES)
        count += len(node.values) - 1 if isinstance(node, ast.BoolOp) else 0
    return count


def read_package(package: Path) -> list[SourceFile]:
    return [SourceFile(path, package) for path in sorted(package.rglob("*.py"))]


def room_imports(files: list[SourceFile]) -> dict[str, set[str]]:
    """Room -> rooms that it imports."""
    rooms = {file.module: file.room for file in files}
    graph: dict[str, set[str]] = defaultdict(set)
    for file in files:
        if file.name == "__init__.py":  # imports lazily
            continue
        for name in file.imports():
            while name and name not in rooms:
                name = name.rpartition(".")[0]
            if name.count(".") and rooms[name] != file.room:
                graph[file.room].add(rooms[name])
    return graph


def find_cycles(graph: Mapping[str, set[str]]) -> list[list[str]]:
    """Groups of rooms that reach one another (strongly connected components of more than one room)."""
    reached: dict[str, set[str]] = {}
    for start in graph:
        seen: set[str] = set()
        todo = list(graph[start])
        while todo:
            room = todo.pop()
            if room not in seen:
                seen.add(room)
                todo += graph.get(room, ())
        reached[start] = seen
    groups = {
        tuple(sorted(other for other in reached if other in reached[room] and room in reached[other]))
        for room in reached
        if room in reached[room]
    }
    return [list(group) for group in sorted(groups)]


def percentile(values: list[int], share: float) -> int:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))] if values else 0


def measure(package: Path) -> dict[str, object]:
    files = read_package(package)
    functions = [function for file in files for function in file.functions()]
    lines = [file.num_lines for file in files]
    sizes = [function.num_lines for function in functions]
    branches = [function.num_branches for function in functions]
    graph = room_imports(files)
    return {
        "files": len(files),
        "lines": sum(lines),
        "code_lines": sum(file.num_code_lines for file in files),
        "file_lines_median": int(statistics.median(lines)),
        "file_lines_p90": percentile(lines, 0.9),
        "file_lines_max": max(lines),
        "files_over_500": [file.name for file in files if file.num_lines > MAX_FILE_LINES],
        "functions": len(functions),
        "function_lines_median": int(statistics.median(sizes)),
        "function_lines_p90": percentile(sizes, 0.9),
        "function_lines_max": max(sizes),
        "functions_over_60": [one.where for one in functions if one.num_lines > 60],
        "branches_p90": percentile(branches, 0.9),
        "branches_max": max(branches),
        "most_branches": [one.where for one in sorted(functions, key=lambda one: -one.num_branches)[:3]],
        "rooms": len({file.room for file in files}),
        "room_imports": sum(len(targets) for targets in graph.values()),
        "cycles": find_cycles(graph),
        "prose_lines": sum(file.num_prose_lines for file in files),  # comments, docstrings, strings
        "idiom_lines": sum(file.num_idiom_lines for file in files),
        "idiom_users": {
            file.name: file.num_idiom_lines
            for file in sorted(files, key=lambda one: -one.num_idiom_lines)[:5]
            if file.num_idiom_lines
        },
        "privates_of_others": sum(file.privates_of_others() for file in files),
        "private_users": {
            file.name: number
            for file in sorted(files, key=lambda one: -one.privates_of_others())[:5]
            if (number := file.privates_of_others())
        },
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default = Path(__file__).resolve().parents[1] / "vllm_omni"
    parser.add_argument("package", nargs="?", type=Path, default=default, help="default: %(default)s")
    parser.add_argument("--json", action="store_true", help="one line of JSON")
    parser.add_argument("--check", action="store_true", help="exit 1 with a file over 500 lines or a cycle")
    options = parser.parse_args()
    figures = measure(options.package)
    if options.json:
        print(json.dumps(figures))
    else:
        width = max(map(len, figures))
        for name, value in figures.items():
            print(f"{name:{width}}  {value}")
    wrong = [name for name in ("files_over_500", "cycles") if options.check and figures[name]]
    for name in wrong:
        print(f"error: {name} must be empty, and is {figures[name]}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
