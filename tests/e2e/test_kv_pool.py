"""KV pages that outlive their engine: LLaVA with a pool, held against an engine without one.

Pages in the pool change which tokens are computed, never which are answered.
"""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from vllm import SamplingParams

from tests.e2e.engines import MARKS, UPSTREAM, greedy, make_image
from tests.redis_server import start_redis
from vllm_omni import OmniLLM
from vllm_omni.kv.pool.ownership import SLAB_SUFFIX
from vllm_omni.kv.pool.slab_format import HEADER_BYTES
from vllm_omni.testing import llava

pytestmark = [*MARKS, pytest.mark.timeout(400), pytest.mark.long]

BLOCK = UPSTREAM["block_size"]
ENGINE = {name: value for name, value in UPSTREAM.items() if name != "block_size"} | {
    "block_size": BLOCK,
    "max_num_batched_tokens": 96,  # prompts are computed in pieces
}
TEXT = " ".join(f"w{number}" for number in range(100))


class Answer(NamedTuple):
    ids: list[int]
    num_cached: int


def make_prompts() -> list[dict[str, Any]]:
    """Texts with a common start, and one text about two images."""
    texts = [{"prompt": f"<s> {TEXT} w{number}"} for number in (1, 2)]
    images = [
        {"prompt": f"<s> <image> {TEXT} w5", "multi_modal_data": {"image": make_image(number)}} for number in (1, 2)
    ]
    return [*texts, *images, {"prompt": f"<s> w7 {TEXT}"}]


def ask(omni: OmniLLM, prompts: list[dict[str, Any]], params: SamplingParams | None = None) -> list[Answer]:
    """One prompt after the other, so that what is cached does not depend on the time."""
    answers = []
    for prompt in prompts:
        (output,) = omni.generate(prompt, params or greedy(max_tokens=40))
        answers.append(Answer(list(output.outputs[0].token_ids), output.num_cached_tokens or 0))
    return answers


def ids_of(answers: list[Answer]) -> list[list[int]]:
    return [answer.ids for answer in answers]


class Pool(NamedTuple):
    """A directory for slabs and one for the disk, and engines that use them."""

    root: Path
    model: Path

    def section(self, **more: Any) -> dict[str, Any]:
        kept = {"memory_bytes": 8 << 20, "staging_bytes": 4 << 20, "disk": str(self.root / "disk")}
        return {**kept, "disk_bytes": 16 << 20, "directory": str(self.root / "slabs"), **more}

    def engine(self, section: dict[str, Any] | None = None, **more: Any) -> OmniLLM:
        return OmniLLM(more.pop("model", self.model), **{**ENGINE, **more}, kv_pool=section or self.section())

    @property
    def slabs(self) -> list[Path]:
        return sorted((self.root / "slabs").glob(f"*{SLAB_SUFFIX}"))

    @property
    def pages_on_disk(self) -> list[Path]:
        return sorted((self.root / "disk").glob("*/*/pages"))


@pytest.fixture(scope="module")
def expected(llava_checkpoint: Path) -> Iterator[list[Answer]]:
    """Of an engine without a pool, whose prefix cache is empty."""
    with OmniLLM(llava_checkpoint, **ENGINE) as omni:
        yield ask(omni, make_prompts())


@pytest.fixture(scope="module")
def filled(llava_checkpoint: Path, expected: list[Answer], tmp_path_factory: pytest.TempPathFactory) -> Pool:
    """A pool that an engine has left."""
    pool = Pool(tmp_path_factory.mktemp("pool"), llava_checkpoint)
    with pool.engine() as omni:
        assert ask(omni, make_prompts()) == expected
    return pool


def damaged(file: Path, start: int) -> None:
    """Flip bytes of every page."""
    data = bytearray(file.read_bytes())
    data[start::4096] = bytes(byte ^ 0xFF for byte in data[start::4096])
    file.write_bytes(data)


def test_the_next_engine_finds_the_pages_of_texts_and_images(filled: Pool, expected: list[Answer]) -> None:
    with filled.engine() as omni:
        answers = ask(omni, make_prompts())
        (longer,) = ask(omni, [{"prompt": f"<s> {TEXT} w1 w9 w9"}])
    assert ids_of(answers) == ids_of(expected)
    assert all(answer.num_cached >= 96 for answer in answers), answers
    first, second = answers[2:4]
    assert first.num_cached == second.num_cached >= 96 and first.ids != second.ids, "each image has pages of its own"
    assert longer.num_cached >= 96


def test_an_engine_reads_the_pages_of_one_beside_it_and_of_one_that_was_killed(
    llava_checkpoint: Path, expected: list[Answer], tmp_path: Path
) -> None:
    pool = Pool(tmp_path, llava_checkpoint)
    section = pool.section(disk=None)
    del section["disk_bytes"]
    with pool.engine(section) as first, pool.engine(section) as second:
        assert ask(first, make_prompts()[:2]) == expected[:2]
        answers = ask(second, make_prompts()[:1])
        assert ids_of(answers) == ids_of(expected[:1]) and answers[0].num_cached >= 96
        for engine in first.engine.orchestrator.engines.values():
            engine.kill()
        answers = ask(second, make_prompts())
    assert ids_of(answers) == ids_of(expected) and answers[1].num_cached >= 96
    assert 1 <= len(pool.slabs) <= 2, "a restarted engine may have adopted that of the killed one"


def test_a_restarted_host_has_the_pages_on_disk(filled: Pool, expected: list[Answer]) -> None:
    for slab in filled.slabs:
        slab.unlink()
    with filled.engine() as omni:
        answers = ask(omni, make_prompts())
    assert ids_of(answers) == ids_of(expected) and all(answer.num_cached >= 96 for answer in answers)


def test_damaged_pages_and_cut_files_are_recomputed(filled: Pool, expected: list[Answer]) -> None:
    """Last of the tests of this pool: what it has is of no use any longer."""
    for slab in filled.slabs:
        damaged(slab, HEADER_BYTES + (64 << 10))
    for pages in filled.pages_on_disk:
        damaged(pages, 100)
    with filled.engine() as omni:
        assert ids_of(ask(omni, make_prompts())) == ids_of(expected)
    for slab in filled.slabs:
        slab.unlink()
    for pages in filled.pages_on_disk:
        with pages.open("r+b") as file:
            file.truncate(pages.stat().st_size // 2)
    with filled.engine() as omni:
        assert ids_of(ask(omni, make_prompts())) == ids_of(expected)


def test_other_weights_and_other_tenants_share_nothing(
    llava_checkpoint: Path, expected: list[Answer], tmp_path: Path
) -> None:
    pool, prompt = Pool(tmp_path, llava_checkpoint), make_prompts()[0]
    with pool.engine() as omni:
        tenants = [ask(omni, [{**prompt, "cache_salt": salt}])[0] for salt in ("one", "two", "one")]
    assert [answer.ids for answer in tenants] == [expected[0].ids] * 3
    assert [answer.num_cached > 0 for answer in tenants] == [False, False, True]
    other = llava.build(tmp_path / "model", seed=5)
    with pool.engine(model=other) as omni:
        (answer,) = ask(omni, [{**prompt, "cache_salt": "one"}])
    assert answer.num_cached == 0 and answer.ids != expected[0].ids


def test_engines_that_share_redis_alone_read_each_other_s_pages(
    llava_checkpoint: Path, expected: list[Answer], tmp_path: Path
) -> None:
    """As engines of two hosts: each has a directory of slabs of its own. Then Redis ends."""
    process, url = start_redis(tmp_path)
    try:
        pools = [Pool(tmp_path / name, llava_checkpoint) for name in ("one", "other")]
        for pool in pools:
            pool.root.mkdir()
        hosts = [pool.section(redis=url) for pool in pools]
        with pools[0].engine(hosts[0]) as one, pools[1].engine(hosts[1]) as other:
            assert ask(one, make_prompts()[:4]) == expected[:4]
            time.sleep(1.0)  # pages are written and announced in the background
            answers = ask(other, make_prompts()[:4])
            assert ids_of(answers) == ids_of(expected[:4])
            # The second starts as the first does. On a busy machine an answer of Redis may come too late for some.
            assert any(answers[index].num_cached >= 96 for index in (0, 2, 3)), answers
            process.kill()
            process.wait(10)
            answers = ask(other, make_prompts())
            assert ids_of(answers) == ids_of(expected), "the last one is computed"
            assert all(answer.num_cached >= 96 for answer in answers[:4]) and ids_of(
                ask(one, make_prompts())
            ) == ids_of(expected)
    finally:
        process.kill()
        process.wait(10)


def test_instances_hand_over_pages_and_find_those_of_the_pool(
    llava_checkpoint: Path, expected: list[Answer], tmp_path: Path
) -> None:
    pool = Pool(tmp_path, llava_checkpoint)
    for index in range(2):
        with pool.engine(epd="E:1,P:1,D:1") as omni:
            answers = ask(omni, make_prompts())
            statistics = omni.engine.instance_statistics()["language"]
        assert ids_of(answers) == ids_of(expected)
        assert statistics.num_migrations == len(expected) and not any(statistics.work.values())
        assert not index or all(answer.num_cached >= 96 for answer in answers), answers


def test_a_pool_that_is_too_small_evicts_and_answers_as_without(
    llava_checkpoint: Path, expected: list[Answer], tmp_path: Path
) -> None:
    pool = Pool(tmp_path, llava_checkpoint)
    section = pool.section(memory_bytes=1 << 18, disk_bytes=1 << 19, staging_bytes=1 << 18)
    for _ in range(2):
        with pool.engine(section, num_gpu_blocks_override=16) as omni:
            for _ in range(2):
                assert ids_of(ask(omni, make_prompts())) == ids_of(expected)
