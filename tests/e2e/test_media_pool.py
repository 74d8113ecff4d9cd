"""Images that were encoded once are not encoded again, by the next engine, one beside it, or after a restart: LLaVA
with a pool of encoded media, held against an engine without one.
"""

import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from prometheus_client import REGISTRY
from vllm.multimodal.utils import encode_image_url

from tests.e2e.engines import MARKS, UPSTREAM, greedy, make_image, tokens_of
from tests.e2e.test_kv_pool import damaged
from tests.server import Server, serve, wait_for
from vllm_omni import OmniLLM
from vllm_omni.errors import InvalidRequest
from vllm_omni.kv.pool.ownership import SLAB_SUFFIX
from vllm_omni.kv.pool.slab import SlabReader
from vllm_omni.testing import llava, qwen2_5_omni

pytestmark = [*MARKS, pytest.mark.timeout(400), pytest.mark.long]

NUM_IMAGES = 4
ENGINE = {**UPSTREAM, "max_num_batched_tokens": llava.NUM_IMAGE_TOKENS}
"""Its encoder cache has room for one image, so that an image is only found again in the pool."""


def make_prompts(first: int = 0) -> list[dict[str, Any]]:
    """A question about each image, which begins as no earlier one did if ``first`` differs: no prefix is cached."""
    return [
        {"prompt": f"<s> w{first + n} <image> w3", "multi_modal_data": {"image": make_image(n)}}
        for n in range(NUM_IMAGES)
    ]


ROUNDS = [make_prompts(first) for first in (0, 20)]


def ask(omni: OmniLLM, prompts: Sequence[dict[str, Any]]) -> list[list[int]]:
    """One prompt after the other: what is cached does not depend on the time."""
    return [tokens_of(omni.generate(prompt, greedy()))[0] for prompt in prompts]


class Counts(NamedTuple):
    encoded: int
    hits: int
    corrupt: int


def counts(**labels: str) -> Counts:
    """Of all engines of this process's servers."""
    wanted = labels.items()

    def total(name: str) -> int:
        samples = (one for metric in REGISTRY.collect() for one in metric.samples)
        name = f"vllm:media_pool_{name}_total"
        return int(sum(one.value for one in samples if one.name == name and wanted <= one.labels.items()))

    return Counts(*map(total, Counts._fields))


class Pool(NamedTuple):
    root: Path
    model: Path

    def section(self, **more: Any) -> dict[str, Any]:
        media = {"memory_bytes": 0, "media_bytes": 4 << 20, "directory": str(self.root / "slabs")}
        disk = {"disk": str(self.root / "disk"), "disk_bytes": 0, "media_disk_bytes": 8 << 20}
        return {**media, **disk, **more}

    def engine(self, section: dict[str, Any] | None = None, **more: Any) -> OmniLLM:
        return OmniLLM(
            more.pop("model", self.model), log_stats=True, **ENGINE | more, kv_pool=section or self.section()
        )

    @property
    def slabs(self) -> list[Path]:
        return sorted((self.root / "slabs").glob(f"*{SLAB_SUFFIX}"))

    @property
    def pages_on_disk(self) -> list[Path]:
        return sorted((self.root / "disk").glob("*/*/pages"))


@pytest.fixture(scope="module")
def expected(llava_checkpoint: Path) -> Iterator[list[list[list[int]]]]:
    """The replies of each round, of an engine without a pool."""
    with OmniLLM(llava_checkpoint, **ENGINE) as omni:
        replies = [ask(omni, prompts) for prompts in ROUNDS]
    assert len({tuple(reply) for reply in replies[0]}) == NUM_IMAGES, "replies depend on the image"
    yield replies


@pytest.fixture(scope="module")
def filled(llava_checkpoint: Path, expected: list[list[list[int]]], tmp_path_factory: pytest.TempPathFactory) -> Pool:
    """A pool that an engine has left, which encoded each image once and read it once."""
    pool = Pool(tmp_path_factory.mktemp("pool"), llava_checkpoint)
    with pool.engine() as omni:
        assert ask(omni, ROUNDS[0]) == expected[0]
        assert counts() == (NUM_IMAGES, 0, 0)
        assert ask(omni, ROUNDS[1]) == expected[1]
        assert counts() == (NUM_IMAGES, NUM_IMAGES, 0)
    return pool


def test_the_next_engine_encodes_nothing(filled: Pool, expected: list[list[list[int]]]) -> None:
    with filled.engine() as omni:
        assert ask(omni, ROUNDS[0]) == expected[0]
        assert counts() == (0, NUM_IMAGES, 0)
        assert counts(medium="memory").hits == NUM_IMAGES


def test_budgets_and_instances_read_the_pool(filled: Pool, expected: list[list[list[int]]]) -> None:
    for epd in ({"token_budget": 64, "image_budget": llava.NUM_IMAGE_TOKENS}, {"instances": "E:1,PD:1"}):
        with filled.engine(epd=epd) as omni:
            assert ask(omni, ROUNDS[0]) == expected[0], epd
            assert counts()[:2] == (0, NUM_IMAGES), epd
            if "instances" in epd:
                statistics = omni.engine.instance_statistics()["language"]
                assert statistics.num_encoded == 0 and statistics.num_tasks == {"language/PD0": NUM_IMAGES}


def test_an_image_is_encoded_by_one_instance_and_then_read_by_another(
    llava_checkpoint: Path, expected: list[list[list[int]]], tmp_path: Path
) -> None:
    with Pool(tmp_path, llava_checkpoint).engine(epd="E:1,PD:1") as omni:
        for replies, prompts in zip(expected, ROUNDS, strict=True):
            assert ask(omni, prompts) == replies
        statistics = omni.engine.instance_statistics()["language"]
        assert statistics.num_tasks == {"language/E0": NUM_IMAGES, "language/PD0": 2 * NUM_IMAGES}
        assert statistics.num_encoded == NUM_IMAGES and statistics.images.num_images == 0
        assert counts(medium="peer").hits == NUM_IMAGES


def test_a_restarted_host_reads_the_disk(filled: Pool, expected: list[list[list[int]]]) -> None:
    for slab in filled.slabs:
        slab.unlink()
    with filled.engine() as omni:
        assert ask(omni, ROUNDS[0]) == expected[0]
        assert (counts().encoded, counts(medium="disk").hits) == (0, NUM_IMAGES)
        assert ask(omni, ROUNDS[1]) == expected[1]
        hits = {medium: counts(medium=medium).hits for medium in ("memory", "disk")}
        assert counts().encoded == 0
        assert sum(hits.values()) == 2 * NUM_IMAGES and hits["memory"], "what was read is put into memory, behind it"


def test_damaged_media_are_encoded_again(filled: Pool, expected: list[list[list[int]]]) -> None:
    """Last of the tests of this pool: all that it has is damaged."""
    for slab in filled.slabs:
        damaged(slab, 16 << 10)
    for pages in filled.pages_on_disk:
        damaged(pages, 100)
    with filled.engine() as omni:
        assert ask(omni, ROUNDS[0]) == expected[0]
        encoded, hits, corrupt = counts()
        assert (encoded, hits) == (NUM_IMAGES, 0) and corrupt >= NUM_IMAGES
        assert ask(omni, ROUNDS[1]) == expected[1]
        assert counts().hits == NUM_IMAGES


def test_an_engine_reads_one_beside_it_and_one_that_was_killed(
    llava_checkpoint: Path, expected: list[list[list[int]]], tmp_path: Path
) -> None:
    pool = Pool(tmp_path, llava_checkpoint)
    section = {name: value for name, value in pool.section().items() if "disk" not in name}
    with pool.engine(section) as first, pool.engine(section) as second:
        assert ask(first, ROUNDS[0]) == expected[0]
        assert ask(second, ROUNDS[0][:2]) == expected[0][:2]
        assert (counts().encoded, counts(medium="peer").hits) == (NUM_IMAGES, 2)
        for engine in first.engine.orchestrator.engines.values():
            for pid in engine.pids():
                os.kill(pid, signal.SIGKILL)
        assert ask(second, ROUNDS[1]) == expected[1]
        assert counts().encoded == NUM_IMAGES


def test_tenants_and_other_weights_share_nothing(
    llava_checkpoint: Path, expected: list[list[list[int]]], tmp_path: Path
) -> None:
    pool = Pool(tmp_path, llava_checkpoint)
    salted = [{**ROUNDS[0][0], "cache_salt": salt} for salt in ("one", "two")]
    with pool.engine() as omni:
        assert ask(omni, [*salted, ROUNDS[0][0]]) == [expected[0][0]] * 3
        assert counts().encoded == 3
    with pool.engine() as omni:
        assert ask(omni, salted) == [expected[0][0]] * 2
        assert counts()[:2] == (0, 2)
    with pool.engine(model=llava.build(tmp_path / "other", seed=5)) as omni:
        assert ask(omni, ROUNDS[0][:1]) != expected[0][:1]
        assert counts()[:2] == (1, 0)


def test_media_are_named_by_content_whatever_they_are_called(
    llava_checkpoint: Path, expected: list[list[list[int]]], tmp_path: Path
) -> None:
    """vLLM would name them by a counter here: with its caches off."""
    pool, off = Pool(tmp_path, llava_checkpoint), {"enable_prefix_caching": False, "mm_processor_cache_gb": 0}
    named = [{**prompt, "multi_modal_uuids": {"image": ["same"]}} for prompt in ROUNDS[0]]
    for index, prompts in enumerate([ROUNDS[0], ROUNDS[0][::-1], named]):
        with pool.engine(**off) as omni:
            assert ask(omni, prompts) == (expected[0][::-1] if index == 1 else expected[0])
            assert counts().encoded == (0 if index else NUM_IMAGES)
            nameless = {**named[0], "multi_modal_data": {"image": None}}
            with pytest.raises(InvalidRequest, match="media are named by their content"):
                omni.generate(nameless, greedy())


def test_ranks_of_one_engine_read_together(
    llava_checkpoint: Path, expected: list[list[list[int]]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    pool = Pool(tmp_path, llava_checkpoint)
    for index in range(2):
        with pool.engine(tensor_parallel_size=2) as omni:
            assert ask(omni, ROUNDS[index]) == expected[index]
            assert counts()[:2] == ((0, NUM_IMAGES) if index else (NUM_IMAGES, 0))


def test_sounds_and_images_of_qwen2_5_omni_are_kept(tmp_path: Path) -> None:
    model = qwen2_5_omni.build(tmp_path / "model")
    media = {"image": make_image(1), "audio": (np.sin(np.arange(8000) / 9).astype(np.float32), 16000)}
    text = "<|vision_bos|><|IMAGE|><|vision_eos|><|audio_bos|><|AUDIO|><|audio_eos|> What is this?"
    prompt = {"prompt": text, "multi_modal_data": media}
    kv_pool = {"memory_bytes": 0, "media_bytes": 4 << 20, "directory": str(tmp_path / "slabs")}
    replies = []
    for section in (None, kv_pool, kv_pool):
        with OmniLLM(model, log_stats=True, kv_pool=section, enforce_eager=True, max_model_len=1024) as omni:
            (output,) = omni.generate(prompt, greedy(), modalities=["text"])
            replies.append(list(output.outputs[0].token_ids))
            found = counts(stage="thinker")
    assert replies[0] == replies[1] == replies[2] and found[:2] == (0, 2)


def test_the_next_server_encodes_nothing_of_the_last_one_that_was_killed(
    llava_checkpoint: Path, tmp_path: Path
) -> None:
    flags = ["--dtype=float32", "--enforce-eager", "--max-model-len=256", "--kv-pool=0"]
    flags += [
        "--stage=language.kv_pool.media_bytes=4194304",
        f"--stage=language.kv_pool.directory={tmp_path / 'slabs'}",
    ]
    content = [
        {"type": "text", "text": "w1 w2"},
        {"type": "image_url", "image_url": {"url": encode_image_url(make_image(1))}},
    ]

    def total(server: Server, name: str) -> float:
        return server.metric(rf"vllm:media_pool_{name}_total{{.*}}")

    texts = []
    for index in range(2):
        with serve(llava_checkpoint, tmp_path / "log", *flags, VLLM_OMNI_MEDIA_CACHE_BYTES="1000000") as server:
            reply = server.client.chat.completions.create(
                model="tiny", messages=[{"role": "user", "content": content}], max_tokens=8, temperature=0.0
            )
            texts.append(reply.choices[0].message.content)
            assert total(server, "encoded") == (not index)
            if not index:
                wait_for("the image is stored", lambda: is_stored(tmp_path / "slabs"))
                server.process.kill()
                server.process.wait()
                continue
            assert ask_again(server, content) and server.metric("vllm_omni:media_found_decoded_total") == 1
    assert texts[0] == texts[1]


def ask_again(server: Server, content: list[dict[str, Any]]) -> str:
    """The reply to another text about the same image."""
    messages: Any = [{"role": "user", "content": [{"type": "text", "text": "w7"}, content[1]]}]
    reply = server.client.chat.completions.create(model="tiny", messages=messages, max_tokens=8, temperature=0.0)
    return str(reply.choices[0].message.content)


def is_stored(slabs: Path) -> bool:
    """Whether a slab has the first page of a tensor, which is written last."""
    (path,) = slabs.iterdir()
    with closing(SlabReader(path, path.name.partition("-")[0])) as reader:
        return any(key[-4:] == bytes(4) for key, _ in reader.entries())
