"""Both paths of each copy give the same bytes, on the CPU and, where there is one, on a GPU."""

import ctypes
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from vllm_omni.errors import MissingDependency
from vllm_omni.ops import native
from vllm_omni.ops.block_copy import BlockStack, flat_to_nhd, gather_pages, nhd_to_flat, scatter_pages

ROOT = Path(__file__).resolve().parents[2]
NVCC = shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")
DTYPES = [torch.uint8, torch.bfloat16, torch.float32, torch.float8_e4m3fn, torch.complex128]
PATHS = ["torch", "native"]

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
needs_nvcc = pytest.mark.skipif(NVCC is None, reason="needs nvcc, on PATH or in /usr/local/cuda/bin")
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")


def build(platform: str, directory: Path) -> Path:
    """A library of these very sources, whatever was built before."""
    library = directory / f"libvllm_omni_{platform}.so"
    command = ["make", "--silent", f"NATIVE={directory}", str(library)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return library


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("native")
    if shutil.which("g++"):
        build("cpu", directory)
    return directory


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Path], None]]:
    """Sets where the libraries are looked for."""

    def set_place(directory: Path) -> None:
        monkeypatch.setattr(native, "DIRECTORY", directory)
        native.find.cache_clear()

    yield set_place
    native.find.cache_clear()


@pytest.fixture(params=["torch", pytest.param("native", marks=needs_compiler)])
def path(request: pytest.FixtureRequest, place: Callable[[Path], None], built: Path) -> str:
    place(built)
    return request.param


def random_tensor(*shape: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> torch.Tensor:
    """Random bits, NaN among them."""
    numbers = torch.randint(0, 256, (*shape[:-1], shape[-1] * dtype.itemsize), dtype=torch.uint8)
    return numbers.view(dtype).to(device)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def make_layers(layout: str, dtype: torch.dtype, num_layers: int = 3, num_blocks: int = 7, device: str = "cpu"):
    """Layers [P, B, N, H, D] of every layout that a stack may have."""
    layers = []
    for _ in range(num_layers):
        if layout == "parts first":
            layer = random_tensor(2, num_blocks, 4, 3, 5, dtype=dtype, device=device)
        elif layout == "blocks first":
            layer = random_tensor(num_blocks, 2, 4, 3, 8, dtype=dtype, device=device).transpose(0, 1)
        elif layout == "K and V in D":
            layer = random_tensor(num_blocks, 4, 3, 16, dtype=dtype, device=device).unsqueeze(0)
        else:
            layer = random_tensor(2, num_blocks, 6, 3, 5, dtype=dtype, device=device)[:, :, :4]
        layers.append(layer)
    return layers


LAYOUTS = ["parts first", "blocks first", "K and V in D", "gaps"]


def check_pages(path, dtype, page, gap, count, device="cpu", flat_like=torch.empty_like):
    slab = random_tensor(9, *page[:-1], page[-1] + gap, dtype=dtype, device=device)[..., : page[-1]]
    if gap and len(page) > 1:
        slab = random_tensor(9, page[0] + gap, *page[1:], dtype=dtype, device=device)[:, : page[0]]
    pages = torch.randperm(9)[:count].clone()
    out = flat_like(slab[:count].contiguous())
    gather_pages(slab, pages, out, path=path)
    if device != "cpu":
        torch.cuda.synchronize()
    assert same_bits(out.to(device), slab[pages.to(device)])
    target = random_tensor(9, *page, dtype=dtype, device=device)
    wanted = target.clone()
    wanted[pages.to(device)] = out.to(device)
    scatter_pages(out, pages, target, path=path)
    assert same_bits(target, wanted)


def check_stack(path, layout, dtype, device="cpu", flat_like=torch.empty_like, **sizes):
    layers = make_layers(layout, dtype, device=device, **sizes)
    stack = BlockStack(layers)
    blocks = torch.randperm(stack.num_blocks)[: stack.num_blocks // 2 + 1].clone()
    # The definition of the flat layout, block by block.
    wanted = torch.stack([torch.stack([layer[:, block] for layer in layers]) for block in blocks.tolist()])
    flat = flat_like(wanted)
    nhd_to_flat(stack, blocks, flat, path=path)
    if device != "cpu":
        torch.cuda.synchronize()
    assert same_bits(flat.to(device), wanted)
    others = make_layers(layout, dtype, device=device, **sizes)
    untouched = [block for block in range(stack.num_blocks) if block not in blocks.tolist()]
    before = [layer[:, untouched].clone() for layer in others]
    flat_to_nhd(flat, blocks, BlockStack(others), path=path)
    for layer, other, rest in zip(layers, others, before, strict=True):
        assert same_bits(other[:, blocks.to(device)], layer[:, blocks.to(device)])
        assert same_bits(other[:, untouched], rest)


# --- the same bytes on both paths


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("page", [(1,), (3,), (16,), (4, 8), (2, 3, 5), (1000,)], ids=str)
@pytest.mark.parametrize("gap", [0, 1, 16])
@pytest.mark.parametrize("count", [0, 1, 9])
def test_pages_are_copied_bit_by_bit(path, dtype, page, gap, count):
    check_pages(path, dtype, page, gap, count)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_blocks_of_all_layers_are_copied_bit_by_bit(path, layout, dtype):
    check_stack(path, layout, dtype)


@pytest.mark.parametrize("shift", [1, 2])
def test_a_flat_side_that_is_not_aligned(path, shift):
    layers = make_layers("K and V in D", torch.bfloat16)
    flat = random_tensor(2 * 3 * 4 * 3 * 16 + shift, dtype=torch.bfloat16)[shift:].view(2, 3, 1, 4, 3, 16)
    nhd_to_flat(BlockStack(layers), torch.tensor([5, 0]), flat, path=path)
    assert same_bits(flat[0, 1, 0], layers[1][0, 5])
    assert same_bits(flat[1, 2, 0], layers[2][0, 0])


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(pages=st.lists(st.integers(0, 11), max_size=30), page_bytes=st.integers(1, 70))
def test_pages_may_be_gathered_twice_and_in_any_order(path, pages, page_bytes):
    slab = random_tensor(12, page_bytes, dtype=torch.uint8)
    out = torch.empty(len(pages), page_bytes, dtype=torch.uint8)
    gather_pages(slab, torch.tensor(pages, dtype=torch.int64), out, path=path)
    assert torch.equal(out, slab[pages])


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(blocks=st.lists(st.integers(0, 6), unique=True), layout=st.sampled_from(LAYOUTS))
def test_what_was_made_flat_comes_back(path, blocks, layout):
    layers, others = make_layers(layout, torch.bfloat16), make_layers(layout, torch.bfloat16)
    stack, indices = BlockStack(layers), torch.tensor(blocks, dtype=torch.int64)
    flat = torch.empty(len(blocks), *stack.flat_shape, dtype=torch.bfloat16)
    nhd_to_flat(stack, indices, flat, path=path)
    flat_to_nhd(flat, indices, BlockStack(others), path=path)
    assert all(same_bits(a[:, indices], b[:, indices]) for a, b in zip(layers, others, strict=True))


# --- what is refused


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
def test_pages_that_do_not_fit_are_refused(path, slab, pages, out, message):
    with pytest.raises(ValueError, match=message):
        gather_pages(slab, pages, out, path=path)
    with pytest.raises(ValueError, match=message):
        scatter_pages(out, pages, slab, path=path)


def test_nothing_is_copied_when_an_index_is_out_of_range(path):
    target = torch.zeros(9, 4, 8)
    with pytest.raises(ValueError, match="page index 9"):
        scatter_pages(torch.ones(2, 4, 8), torch.tensor([0, 9]), target, path=path)
    assert not target.any()


def test_sides_that_overlap_are_refused(path):
    slab = torch.arange(64.0).view(8, 8)
    with pytest.raises(RuntimeError, match=r"overlap|single memory location"):
        gather_pages(slab, torch.tensor([0, 1]), slab[1:3], path=path)
    assert torch.equal(slab, torch.arange(64.0).view(8, 8))


LAYER = torch.zeros(2, 7, 4, 3, 8)


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ([], r"a stack of 0 layers: must be at least 1"),
        ([LAYER[0]], r"layer 0 is float32 \(7, 4, 3, 8\) on cpu: must be \[parts, blocks, N, H, D\]"),
        ([LAYER[:, :0]], r"none of them 0"),
        ([LAYER, LAYER.double()], r"layer 1 is float64 .* must be like layer 0, float32"),
        ([LAYER, LAYER[:, :6]], r"layer 1 is float32 \(2, 6, 4, 3, 8\)"),
        ([LAYER, torch.zeros(7, 2, 4, 3, 8).transpose(0, 1)], r"layer 1 is .* strides \(96, 192, 24, 8, 1\)"),
        ([LAYER.transpose(2, 3)], r"strides .* must be those of NHD"),
        ([LAYER[:, :1].expand(2, 7, 4, 3, 8)], r"strides .* must be those of NHD"),
    ],
)
def test_layers_that_are_no_stack_are_refused(layers, message):
    with pytest.raises(ValueError, match=message):
        BlockStack(layers)


def test_blocks_that_do_not_fit_are_refused(path):
    stack = BlockStack([LAYER])
    with pytest.raises(ValueError, match="block index 7: must be at least 0 and below 7"):
        nhd_to_flat(stack, torch.tensor([7]), torch.zeros(1, 1, 2, 4, 3, 8), path=path)
    with pytest.raises(ValueError, match=r"must be float32 \(1, 1, 2, 4, 3, 8\) on cpu"):
        flat_to_nhd(torch.zeros(1, 1, 2, 4, 3, 9), torch.tensor([6]), stack, path=path)


# --- which path


def test_without_the_library_torch_copies(place, tmp_path):
    place(tmp_path)
    check_pages(None, torch.float32, (4, 8), 0, 9)
    check_stack(None, "parts first", torch.bfloat16)
    with pytest.raises(MissingDependency, match=r"no library for cpu .* `make native` builds it"):
        check_pages("native", torch.float32, (4, 8), 0, 9)


def test_a_file_that_is_no_library_is_told_and_left_alone(place, tmp_path, caplog):
    (tmp_path / "libvllm_omni_cpu.so").write_text("not one")
    place(tmp_path)
    check_stack(None, "parts first", torch.bfloat16)
    assert "libvllm_omni_cpu.so is not used" in caplog.text


@needs_compiler
def test_a_library_of_another_abi_is_told_and_left_alone(place, built, monkeypatch, caplog):
    place(built)
    monkeypatch.setattr(native, "ABI", 0)
    check_stack(None, "parts first", torch.bfloat16)
    assert "its ABI is 1, not 0" in caplog.text


def test_a_path_that_does_not_exist_is_refused():
    with pytest.raises(ValueError, match="path 'cuda': must be 'native', 'torch' or None"):
        gather_pages(SLAB, PAGES, OUT, path="cuda")


@needs_compiler
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


@needs_compiler
@pytest.mark.parametrize(("num_blocks", "threads", "is_native"), [(16, 2, True), (17, 1, True), (17, 2, False)])
def test_the_library_copies_blocks_where_it_was_faster(place, built, monkeypatch, num_blocks, threads, is_native):
    place(built)
    called: list[str] = []
    monkeypatch.setattr(native, "call", lambda library, name, *_: called.append(name))
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    stack = BlockStack([torch.zeros(1, 17, 16, 8, 64)])  # a block is 32 KiB
    flat = torch.zeros(num_blocks, *stack.flat_shape)
    nhd_to_flat(stack, torch.arange(num_blocks), flat)
    flat_to_nhd(flat, torch.arange(num_blocks), stack)
    assert called == ["omni_nhd_to_flat", "omni_flat_to_nhd"] * is_native


# --- the C ABI, for whoever calls it without the Python face


BIG = 2**62


@needs_compiler
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dst": None}, "a pointer is null"),
        ({"src": None}, "a pointer is null"),
        ({"pages": None}, "a pointer is null"),
        ({"num_pages": -1}, "a size or a count is negative"),
        ({"page_bytes": 0}, "a size or a count is negative, or zero"),
        ({"num_slots": 0}, "a size or a count is negative, or zero"),
        ({"page_stride": 7}, "a stride is smaller than what lies there"),
        ({"page_stride": -8}, "a stride is smaller than what lies there"),
        ({"page_stride": BIG}, "more than 64 bits can address"),
        ({"page_bytes": BIG, "page_stride": BIG, "num_slots": 1}, "more than 64 bits can address"),
        ({"num_slots": 3}, "an index is out of range"),
        ({"num_pages": 0, "dst": None}, "no error"),
    ],
)
def test_the_library_checks_by_itself(built, change, message):
    library = ctypes.CDLL(str(built / "libvllm_omni_cpu.so"))
    library.omni_error_text.restype = ctypes.c_char_p
    slab, out = ctypes.create_string_buffer(64), ctypes.create_string_buffer(16)
    arguments = {
        "dst": out,
        "src": slab,
        "pages": (ctypes.c_int64 * 2)(0, 3),
        "num_pages": 2,
        "page_bytes": 8,
        "page_stride": 8,
        "num_slots": 8,
        "stream": None,
    } | change
    sizes = [ctypes.c_int64(value) if isinstance(value, int) else value for value in arguments.values()]
    code = library.omni_gather_pages(*sizes)
    assert message in library.omni_error_text(code).decode()


# --- CUDA


@needs_compiler
@needs_nvcc
def test_the_cuda_half_compiles_and_has_the_same_abi(tmp_path):
    library = ctypes.CDLL(str(build("cuda", tmp_path)))
    assert library.omni_block_copy_abi() == native.ABI
    for name in ("omni_gather_pages", "omni_scatter_pages", "omni_nhd_to_flat", "omni_flat_to_nhd"):
        assert getattr(library, name)


@pytest.fixture(scope="session")
def cuda_built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if NVCC is None or shutil.which("g++") is None:
        pytest.skip("needs nvcc and g++")
    directory = tmp_path_factory.mktemp("cuda")
    build("cuda", directory)
    return directory


def pinned_like(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(tensor, device="cpu").pin_memory()


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("flat_like", [torch.empty_like, pinned_like])
@pytest.mark.parametrize("dtype", DTYPES[:3], ids=str)
def test_copies_on_a_gpu(place, cuda_built, path, flat_like, dtype):
    place(cuda_built)
    for page in [(1,), (16,), (4, 8), (5000,)]:
        for gap in (0, 16):
            check_pages(path, dtype, page, gap, 9, "cuda", flat_like)
    for layout in LAYOUTS:
        check_stack(path, layout, dtype, "cuda", flat_like)
    # More layers, and more blocks, than one launch takes.
    check_stack(path, "parts first", dtype, "cuda", flat_like, num_layers=130, num_blocks=5)
    check_stack(path, "parts first", dtype, "cuda", flat_like, num_layers=2, num_blocks=700)
