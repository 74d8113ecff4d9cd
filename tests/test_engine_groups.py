from tests.documents import ROOT
from tests.engine_groups import GROUPS, place_of


def test_files_of_groups_exist() -> None:
    files = [file for files in GROUPS.values() for file in files]
    assert [file for file in files if not (ROOT / file).exists()] == []
    assert len(files) == len(set(files))


def test_groups_come_before_other_files() -> None:
    assert place_of(GROUPS["omni"][0])[2] == "omni"
    other = place_of("tests/flow/test_dependencies.py::test_a[1]")
    assert other[2] == "tests/flow/test_dependencies.py"
    assert all(place_of(file) < other for files in GROUPS.values() for file in files)
