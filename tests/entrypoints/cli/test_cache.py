"""``vllm-omni cache`` on real slabs and segments, with and without engines."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.entrypoints.test_cli import rejected
from tests.kv.pool.stores import LAYOUT, PAGE_BYTES, fill, flip, key_of, load, make_disk, make_slab, page_of, place_of
from tests.test_imports import run_without_vllm
from vllm_omni.entrypoints.cli.main import main
from vllm_omni.kv.pool import inspection, ownership

OTHER = "layout.2"


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """This user's own slabs are left alone, and nothing waits."""
    monkeypatch.setattr(ownership, "slab_directory", lambda: tmp_path / "slabs")
    monkeypatch.setattr(inspection, "SETTLE_S", 0.0)


def run(capsys: pytest.CaptureFixture[str], *args: object) -> list[str]:
    main(["cache", *map(str, args)])
    output = capsys.readouterr()
    assert not output.err
    return output.out.splitlines()


def failed(capsys: pytest.CaptureFixture[str], *args: object) -> list[str]:
    """The output of a command that exits with 1, without an error of its own."""
    with pytest.raises(SystemExit) as exit_info:
        main(["cache", *map(str, args)])
    assert exit_info.value.code == 1
    output = capsys.readouterr()
    assert not output.err
    return output.out.splitlines()


def as_json(capsys: pytest.CaptureFixture[str], *args: object) -> dict[str, Any]:
    return dict(json.loads("\n".join(run(capsys, *args, "--json"))))


# -- stats ------------------------------------------------------------------------------------------------------------


def test_stats_has_a_line_for_each_store(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with make_disk(tmp_path) as disk:
        fill(disk, 1, 2)
        with make_slab(tmp_path, layout=OTHER) as slab:
            fill(slab, 1)
        header, *lines = (line.split() for line in run(capsys, "stats", "--disk", tmp_path / "disk"))
    assert header == ["MEDIUM", "LAYOUT", "ENGINE", "PAGES", "BYTES", "SIZE", "PATH"]
    assert lines == [
        ["memory", OTHER, "none", "1", "4.0", "KiB", "24.0", "KiB", str(slab.path)],
        ["disk", LAYOUT, "runs", "2", "8.0", "KiB", *lines[1][6:8], str(disk.path)],
    ]


def test_stats_as_json(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with make_slab(tmp_path) as slab:
        fill(slab, 1)
    assert as_json(capsys, "stats") == {
        "stores": [
            {
                "medium": "memory",
                "path": str(slab.path),
                "layout": LAYOUT,
                "has_owner": False,
                "is_readable": True,
                "page_bytes": PAGE_BYTES,
                "num_pages": 1,
                "num_bytes": PAGE_BYTES,
                "size_bytes": slab.path.stat().st_size,
            }
        ]
    }


def test_stats_shows_what_cannot_be_read(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with make_slab(tmp_path) as slab:
        fill(slab, 1)
    flip(slab.path, 0)
    _, line = run(capsys, "stats")
    assert line.split() == ["memory", LAYOUT, "none", "unreadable", "-", "24.0", "KiB", str(slab.path)]


def test_slabs_of_a_directory_are_listed_instead_of_those_in_shared_memory(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    with make_slab(tmp_path), make_slab(tmp_path / "a") as first, make_slab(tmp_path / "b") as second:
        stores = as_json(capsys, "stats", "--directory", first.path.parent, "--directory", second.path.parent)["stores"]
    assert [one["path"] for one in stores] == [str(first.path), str(second.path)]


def test_where_nothing_was_kept_there_is_nothing(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    nothing = "no cached pages; those on disk are listed with --disk PATH"
    assert [run(capsys, action) for action in ("stats", "verify", "clear")] == [[nothing], [nothing], ["freed 0 B"]]
    (tmp_path / "disk").mkdir()
    assert run(capsys, "stats", "--disk", tmp_path / "disk") == ["no cached pages"]


# -- verify -----------------------------------------------------------------------------------------------------------


def test_verify_removes_damaged_pages_without_an_engine_and_leaves_those_of_one(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    with make_slab(tmp_path) as slab:
        fill(slab, 1, 2, 3)
        place = place_of(slab, key_of(2))
    flip(*place)
    with make_disk(tmp_path) as disk:
        fill(disk, 1, 2)
        flip(*place_of(disk, key_of(1)))
        lines = failed(capsys, "verify", "--disk", tmp_path / "disk")
        assert key_of(1) in disk
    assert lines == [
        f"{slab.path}: 1 of 3 pages are damaged: removed",
        f"{disk.path}: 1 of 2 pages are damaged: left to the engine that owns them, and never used",
    ]
    with make_slab(tmp_path) as slab:
        assert [load(slab, number) for number in (1, 2, 3)] == [page_of(1), None, page_of(3)]


def test_verify_of_pages_that_are_right_exits_with_0(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with make_slab(tmp_path) as slab:
        fill(slab, 1, 2)
    assert run(capsys, "verify") == [f"{slab.path}: 0 of 2 pages are damaged"]


def test_verify_removes_what_cannot_be_read(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with make_slab(tmp_path) as slab:
        flip(slab.path, 0)
        (line,) = run(capsys, "verify")
        assert line == f"{slab.path}: its header is damaged or not finished yet; left to the engine that owns it"
    (line,) = failed(capsys, "verify")
    assert line == f"{slab.path}: its header was damaged or not finished, so no page could be read: removed"
    assert not slab.path.exists()


def test_verify_as_json(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with make_slab(tmp_path) as slab:
        fill(slab, 1, 2)
        place = place_of(slab, key_of(2))
    flip(*place)
    one = {"medium": "memory", "path": str(slab.path), "layout": LAYOUT, "is_readable": True, "was_repaired": True}
    assert json.loads("\n".join(failed(capsys, "verify", "--json"))) == {
        "stores": [{**one, "num_pages": 2, "num_damaged": 1}],
        "is_damaged": True,
    }
    assert as_json(capsys, "verify") == {"stores": [{**one, "num_pages": 1, "num_damaged": 0}], "is_damaged": False}


# -- clear ------------------------------------------------------------------------------------------------------------


def test_clear_removes_what_no_engine_owns(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with make_slab(tmp_path) as live:
        with make_slab(tmp_path, layout=OTHER) as dead, make_disk(tmp_path) as disk:
            fill(dead, 1, 2)
            fill(disk, 1)
        first, second, *rest = run(capsys, "clear", "--disk", tmp_path / "disk")
        assert first == f"removed {dead.path}, 24.0 KiB, with 2 pages"
        assert second.startswith(f"removed {disk.path}, ") and second.endswith(" KiB, with 1 pages")
        assert rest[0] == f"kept {live.path}, which an engine owns"
        assert rest[1].startswith("freed ")
        assert (live.path.exists(), dead.path.exists(), disk.path.exists()) == (True, False, False)


def test_clear_of_a_layout_leaves_others(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with make_slab(tmp_path) as kept, make_slab(tmp_path, layout=OTHER) as removed:
        pass
    report = as_json(capsys, "clear", "--layout", OTHER)
    assert [one["path"] for one in report["removed"]] == [str(removed.path)]
    assert (report["kept"], report["freed_bytes"]) == ([], 24 * 1024)
    assert (kept.path.exists(), removed.path.exists()) == (True, False)


# -- wrong arguments --------------------------------------------------------------------------------------------------


def test_wrong_arguments_are_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with make_slab(tmp_path):
        pass
    (tmp_path / "file").touch()
    for args, why in [
        ([], "the following arguments are required: action"),
        (["stat"], "invalid value 'stat': did you mean 'stats'?"),
        (["stats", "--dsk", "x"], "unknown flag '--dsk': did you mean '--disk'?"),
        (["clear", "--layout", "layout.3"], "no pages of the layout 'layout.3': did you mean 'layout.1'?"),
        (["stats", "--disk", tmp_path / "none"], "none cannot be read: No such file or directory"),
        (["stats", "--disk", tmp_path / "file"], "file is not a directory"),
        (["clear", "--disk", tmp_path], "is no directory of cached pages: it has 'file', 'slabs'"),
        (["verify", "--directory", tmp_path], "is no directory of slabs: it has 'file', 'slabs'"),
    ]:
        assert why in rejected(capsys, "cache", *map(str, args))


def test_a_file_that_cannot_be_read_is_one_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with make_slab(tmp_path) as slab:
        pass

    def read_shape(path: Path) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(inspection, "read_shape", read_shape)
    assert rejected(capsys, "cache", "stats") == f"vllm-omni: error: {slab.path}: Permission denied"


def test_another_user_s_pages_are_rejected(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with make_slab(tmp_path) as slab:
        pass
    monkeypatch.setattr("os.geteuid", lambda: tmp_path.stat().st_uid + 1)
    assert f"{slab.path.parent} is another user's" in rejected(capsys, "cache", "clear")


def test_it_works_without_vllm() -> None:
    result = run_without_vllm("from vllm_omni.entrypoints.cli.main import main\nmain(['cache', 'stats'])")
    assert result.returncode == 0, result.stderr


def test_help_imports_no_torch() -> None:
    result = run_without_vllm("""
        import sys
        from vllm_omni.entrypoints.cli.main import main
        try: main(["cache", "--help"])
        except SystemExit: pass
        assert "torch" not in sys.modules
    """)
    assert result.returncode == 0, result.stderr
    assert "stats" in result.stdout
