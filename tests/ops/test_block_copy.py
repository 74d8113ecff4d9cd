"""Both paths of each copy give the same bytes."""

import ctypes
import itertools
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests import machine
from vllm_omni.errors import MissingDependency
from vllm_omni.ops import native
from vllm_omni.ops.block_copy import gather_pages, scatter_pages

ROOT = Path(__file__).resolve().parents[2]
DTYPES = [torch.uint8, torch.bfloat16, torch.float32, torch.float8_e4m3fn, torch.complex128]


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a library compiled from these sources, whatever was built before."""
    machine.require("g++")
    directory = tmp_path_factory.mktemp("native")
    command = ["make", "--silent", f"NATIVE={directory}", str(directory / native.FILE)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return directory


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Path], None]]:
    """Sets where the library is looked for."""

    def set_place(directory: Path) -> None:
        monkeypatch.setattr(native, "DIRECTORY", directory)
        native.find.cache_clear()

    yield set_place
    native.find.cache_clear()


@pytest.fixture(params=["torch", "native"])
def path(request: pytest.FixtureRequest, place: Callable[[Path], None]) -> str:
    if request.param == "native":
        place(request.getfixturevalue("built"))
    return request.param


def random_tensor(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Random bits, NaN among them."""
    return torch.randint(0, 256, (*shape[:-1], shape[-1] * dtype.itemsize), dtype=torch.uint8).view(dtype)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def check_pages(path, dtype, page, gap, count):
    case = f"{dtype}, pages {page}, gap {gap}, {count} of 9"
    slab = random_tensor(9, *page[:-1], page[-1] + gap, dtype=dtype)[..., : page[-1]]
    if gap and len(page) > 1:
        slab = random_tensor(9, page[0] + gap, *page[1:], dtype=dtype)[:, : page[0]]
    pages = torch.randperm(9)[:count].clone()
    out = torch.empty_like(slab[:count].contiguous())
    gather_pages(slab, pages, out, path=path)
    assert same_bits(out, slab[pages]), case
    target = random_tensor(9, *page, dtype=dtype)
    wanted = target.clone()
    wanted[pages] = out
    scatter_pages(out, pages, target, path=path)
    assert same_bits(target, wanted), case


# --- the same bytes on both paths


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_pages_are_copied_bit_by_bit(path, dtype):
    for page in [(1,), (3,), (16,), (4, 8), (2, 3, 5), (1000,)]:
        for gap, count in itertools.product([0, 1, 16], [0, 1, 9]):
            check_pages(path, dtype, page, gap, count)


def test_an_unaligned_flat_side_is_copied(path):
    slab = random_tensor(7, 48, dtype=torch.bfloat16)
    for shift in (1, 2):
        flat = random_tensor(2 * 48 + shift, dtype=torch.bfloat16)[shift:].view(2, 48)
        gather_pages(slab, torch.tensor([5, 0]), flat, path=path)
        assert same_bits(flat, slab[[5, 0]]), shift


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(pages=st.lists(st.integers(0, 11), max_size=30), page_bytes=st.integers(1, 70))
def test_pages_may_be_gathered_twice_and_in_any_order(path, pages, page_bytes):
    slab = random_tensor(12, page_bytes, dtype=torch.uint8)
    out = torch.empty(len(pages), page_bytes, dtype=torch.uint8)
    gather_pages(slab, torch.tensor(pages, dtype=torch.int64), out, path=path)
    assert torch.equal(out, slab[pages])


# --- what is rejected


SLAB, OUT, PAGES = torch.zeros(9, 4, 8), torch.zeros(2, 4, 8), torch.tensor([0, 1])


@pytest.mark.parametrize(
    ("slab", "pages", "out", "message"),
    [
        (SLAB, torch.tensor([0, 9]), OUT, r"page index 9: must be at least 0 and below 9"),
        (SLAB, torch.tensor([-1, 3]), OUT, r"page index -1: must be"),
        (SLAB[:0], PAGES, OUT, r"page index 0: must be at least 0 and below 0"),
        (SLAB, PAGES.int(), OUT, r"page indices are int32 \(2,\) on cpu: must be int64 \(num,\)"),
        (SLAB, PAGES[None], OUT, r"page indices are int64 \(1, 2\)"),
        (SLAB, torch.tensor([0, 1, 2, 3])[::2], OUT, r"must be int64 \(num,\) on cpu, contiguous"),
        (SLAB, PAGES, OUT[:1], r"the flat side is float32 \(1, 4, 8\) .* must be float32 \(2, 4, 8\) on cpu"),
        (SLAB, PAGES, OUT.double(), r"the flat side is float64 \(2, 4, 8\)"),
        (SLAB, PAGES, OUT.to("meta"), r"on meta, .* must be float32 \(2, 4, 8\) on cpu"),
        (SLAB, PAGES, OUT.mT.contiguous().mT, r"strides \(32, 1, 4\): must be float32 .*, contiguous"),
        (SLAB.mT, PAGES, OUT.mT, r"pages of float32 \(9, 8, 4\) .* must be \[slots, ...\], each contiguous"),
        (SLAB[:1].expand(9, 4, 8), PAGES, OUT, r"strides \(0, 8, 1\): must be \[slots, ...\]"),
        (torch.zeros(9), PAGES, torch.zeros(2), r"pages of float32 \(9,\)"),
    ],
)
def test_pages_that_do_not_fit_are_rejected(slab, pages, out, message):
    with pytest.raises(ValueError, match=message):
        gather_pages(slab, pages, out)
    with pytest.raises(ValueError, match=message):
        scatter_pages(out, pages, slab)


def test_nothing_is_copied_when_an_index_is_out_of_range(path):
    target = torch.zeros(9, 4, 8)
    with pytest.raises(ValueError, match="page index 9"):
        scatter_pages(torch.ones(2, 4, 8), torch.tensor([0, 9]), target, path=path)
    assert not target.any()


def test_overlapping_sides_are_rejected(path):
    slab = torch.arange(64.0).view(8, 8)
    with pytest.raises(RuntimeError, match=r"overlap|single memory location"):
        gather_pages(slab, torch.tensor([0, 1]), slab[1:3], path=path)
    assert torch.equal(slab, torch.arange(64.0).view(8, 8))


# --- which path


def test_without_the_library_torch_copies(place, tmp_path):
    place(tmp_path)
    check_pages(None, torch.float32, (4, 8), 0, 9)
    with pytest.raises(MissingDependency, match=r"no libvllm_omni_cpu.so in .* `make native` builds it"):
        check_pages("native", torch.float32, (4, 8), 0, 9)


def test_a_file_that_is_not_a_library_is_reported_and_ignored(place, tmp_path, caplog):
    (tmp_path / native.FILE).write_text("not one")
    place(tmp_path)
    check_pages(None, torch.bfloat16, (4, 8), 0, 9)
    assert "libvllm_omni_cpu.so is not used" in caplog.text


def test_a_library_of_another_abi_is_reported_and_ignored(place, built, monkeypatch, caplog):
    place(built)
    monkeypatch.setattr(native, "ABI", 0)
    check_pages(None, torch.bfloat16, (4, 8), 0, 9)
    assert "its ABI is 2, not 0" in caplog.text


def test_an_unknown_path_is_rejected():
    with pytest.raises(ValueError, match="path 'cuda': must be 'native', 'torch' or None"):
        gather_pages(SLAB, PAGES, OUT, path="cuda")


def test_the_library_copies_on_the_cpu_alone():
    slab, out = torch.zeros(9, 4, device="meta"), torch.zeros(2, 4, device="meta")
    with pytest.raises(ValueError, match="path 'native' copies on the CPU, and the pages are on meta"):
        gather_pages(slab, PAGES, out, path="native")


@pytest.mark.parametrize(
    ("num_pages", "page_bytes", "threads", "gathers", "scatters"),
    [(16, 4096, 2, True, True), (16, 65536, 1, False, True), (16, 65536, 2, False, False), (16, 65537, 2, False, True)],
)
def test_the_library_copies_pages_where_it_was_faster(
    place, built, monkeypatch, num_pages, page_bytes, threads, gathers, scatters
):
    place(built)
    called: list[str] = []
    monkeypatch.setattr(native, "call", lambda library, name, *_: called.append(name))
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    slab = torch.zeros(num_pages, page_bytes, dtype=torch.uint8)
    gather_pages(slab, torch.arange(num_pages), slab.clone())
    scatter_pages(slab.clone(), torch.arange(num_pages), slab)
    wanted = {"omni_gather_pages": gathers, "omni_scatter_pages": scatters}
    assert called == [name for name, is_native in wanted.items() if is_native]


# --- the C ABI, for callers other than the Python face


BIG = 2**62


def test_the_library_checks_its_arguments(built):
    library = ctypes.CDLL(str(built / native.FILE))
    library.omni_error_text.restype = ctypes.c_char_p
    slab, out = ctypes.create_string_buffer(64), ctypes.create_string_buffer(16)
    valid = {
        "flat": out,
        "slab": slab,
        "pages": (ctypes.c_int64 * 2)(0, 3),
        "num_pages": 2,
        "page_bytes": 8,
        "page_stride": 8,
        "num_slots": 8,
    }
    for change, message in (
        ({}, "no error"),
        ({"flat": None}, "a pointer is null"),
        ({"slab": None}, "a pointer is null"),
        ({"pages": None}, "a pointer is null"),
        ({"num_pages": -1}, "a size or a count is negative"),
        ({"page_bytes": 0}, "a size or a count is negative, or zero"),
        ({"num_slots": 0}, "a size or a count is negative, or zero"),
        ({"page_stride": 7}, "a stride is smaller than a page"),
        ({"page_stride": -8}, "a stride is smaller than a page"),
        ({"page_stride": BIG}, "more than 64 bits can address"),
        ({"page_bytes": BIG, "page_stride": BIG, "num_slots": 1}, "more than 64 bits can address"),
        ({"num_slots": 3}, "an index is out of range"),
        ({"flat": slab}, "source and destination overlap"),
        ({"num_pages": 0, "flat": None}, "no error"),
    ):
        arguments = (valid | change).values()
        sizes = [ctypes.c_int64(value) if isinstance(value, int) else value for value in arguments]
        for function in (library.omni_gather_pages, library.omni_scatter_pages):
            if function is library.omni_scatter_pages:
                sizes[:2] = sizes[1::-1]
            assert message in library.omni_error_text(function(*sizes)).decode(), change
