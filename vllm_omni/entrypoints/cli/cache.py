"""``vllm-omni cache stats|verify|clear``: the KV pages on this host that outlive their engines, without a server."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_omni.entrypoints.cli.parser import RejectingParser, reason
from vllm_omni.entrypoints.cli.table import print_table
from vllm_omni.errors import ConfigError
from vllm_omni.kv.pool import ownership
from vllm_omni.names import suggest
from vllm_omni.process.memory import format_bytes

if TYPE_CHECKING:
    from vllm_omni.kv.pool.inspection import FoundStore, StoreSummary, Verification

DESCRIPTION = """The KV pages that engines with a kv_pool have left on this host, or use now. `stats` lists the slabs in
shared memory and the segments on disk. `verify` reads all pages; it removes the damaged ones where no engine runs,
reports them where one does, and exits with 1 if there are any. `clear` removes what no engine owns."""
HEADER = ("MEDIUM", "LAYOUT", "ENGINE", "PAGES", "BYTES", "SIZE", "PATH")


def cache(args: Sequence[str]) -> None:
    """Run one of the actions.

    Raises:
        SystemExit: 1 if ``verify`` has found damage.
        ConfigError: a path is no directory of cached pages, or a layout is unknown.
    """
    parser = RejectingParser(prog="vllm-omni cache", description=DESCRIPTION)
    parser.add_argument("action", choices=ACTIONS, help="%(choices)s")
    parser.add_argument(
        "--directory",
        metavar="PATH",
        action="append",
        type=Path,
        help=f"of slabs, instead of {ownership.slab_directory()}; may be repeated",
    )
    parser.add_argument(
        "--disk", metavar="PATH", action="append", type=Path, default=[], help="of pages on disk; may be repeated"
    )
    parser.add_argument("--layout", metavar="ID", help="only pages of this layout")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args(args)
    try:
        ACTIONS[options.action](_find(options), options)
    except OSError as exc:
        raise ConfigError(f"{exc.filename or 'a file of cached pages'}: {reason(exc)}") from exc


def _find(options: Namespace) -> list[FoundStore]:
    from vllm_omni.kv.pool.inspection import find_segments, find_slabs  # imports torch, which --help does not need

    default = [path for path in [ownership.slab_directory()] if path.exists()]  # otherwise no engine has kept pages yet
    slabs = options.directory or default
    stores: list[FoundStore] = [store for path in slabs for store in find_slabs(path)]
    stores += [store for path in options.disk for store in find_segments(path)]
    if options.layout is None:
        return stores
    chosen = [store for store in stores if store.layout == options.layout]
    if not chosen:
        raise ConfigError(f"no pages of the layout {options.layout!r}: {suggest(options.layout, _layouts(stores))}")
    return chosen


def _layouts(stores: Sequence[FoundStore]) -> list[str]:
    return sorted({store.layout for store in stores})


# -- stats ------------------------------------------------------------------------------------------------------------


def _stats(stores: Sequence[FoundStore], options: Namespace) -> None:
    summaries = [summary for _, summary in _summaries(stores)]
    if options.json:
        print(json.dumps({"stores": [summary._asdict() for summary in summaries]}, indent=2))
    elif summaries:
        print_table([HEADER, *map(_row, summaries)])
    else:
        _print_nothing(options)


def _summaries(stores: Sequence[FoundStore]) -> Iterator[tuple[FoundStore, StoreSummary]]:
    for store in stores:
        try:
            yield store, store.summarize()
        except FileNotFoundError:  # removed meanwhile
            continue


def _row(one: StoreSummary) -> tuple[str, ...]:
    engine = "runs" if one.has_owner else "none"
    pages, used = (str(one.num_pages), format_bytes(one.num_bytes)) if one.is_readable else ("unreadable", "-")
    return one.medium, one.layout, engine, pages, used, format_bytes(one.size_bytes), one.path


def _print_nothing(options: Namespace) -> None:
    print("no cached pages" if options.disk else "no cached pages; those on disk are listed with --disk PATH")


# -- verify -----------------------------------------------------------------------------------------------------------


def _verify(stores: Sequence[FoundStore], options: Namespace) -> None:
    found = []
    for store in stores:
        try:
            verification = store.verify()
        except FileNotFoundError:  # removed meanwhile
            continue
        found.append((store, verification))
        if not options.json:
            print(f"{store.path}: {_describe(verification)}", flush=True)
    is_damaged = any(verification.is_damaged for _, verification in found)
    if options.json:
        reports = [
            {"medium": store.medium, "path": str(store.path), "layout": store.layout, **verification._asdict()}
            for store, verification in found
        ]
        print(json.dumps({"stores": reports, "is_damaged": is_damaged}, indent=2))
    elif not found:
        _print_nothing(options)
    if is_damaged:
        raise SystemExit(1)


def _describe(one: Verification) -> str:
    if not one.is_readable:
        if one.was_repaired:
            return "its header was damaged or not finished, so no page could be read: removed"
        return "its header is damaged or not finished yet; left to the engine that owns it"
    counted = f"{one.num_damaged} of {one.num_pages} pages are damaged"
    if not one.num_damaged:
        return counted
    return f"{counted}: {'removed' if one.was_repaired else 'left to the engine that owns them, and never used'}"


# -- clear ------------------------------------------------------------------------------------------------------------


def _clear(stores: Sequence[FoundStore], options: Namespace) -> None:
    removed: list[StoreSummary] = []
    kept: list[StoreSummary] = []
    for store, summary in _summaries(stores):
        (removed if store.remove() else kept).append(summary)
    num_bytes = sum(summary.size_bytes for summary in removed)
    if options.json:
        reports = {name: [one._asdict() for one in which] for name, which in (("removed", removed), ("kept", kept))}
        print(json.dumps({**reports, "freed_bytes": num_bytes}, indent=2))
        return
    for one in removed:
        print(f"removed {one.path}, {format_bytes(one.size_bytes)}, with {one.num_pages} pages")
    for one in kept:
        print(f"kept {one.path}, which an engine owns")
    print(f"freed {format_bytes(num_bytes)}")


ACTIONS: Mapping[str, Callable[[Sequence[FoundStore], Namespace], None]] = {
    "stats": _stats,
    "verify": _verify,
    "clear": _clear,
}
