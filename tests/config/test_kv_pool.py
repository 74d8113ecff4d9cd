"""The section ``kv_pool`` of a stage."""

import json
import shutil
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from vllm.config import VllmConfig

from tests.reference import llama
from vllm_omni.config import load_config
from vllm_omni.config.kv_pool import ROW_BYTES, KVPoolConfig
from vllm_omni.engine.engine_args import create_vllm_config
from vllm_omni.engine.pool_args import check_address, with_offloading
from vllm_omni.errors import ConfigError, MissingDependency
from vllm_omni.messages.media_counts import MEDIA_POOL
from vllm_omni.model_executor.pipeline import StageSpec
from vllm_omni.testing import llava
from vllm_omni.worker.media_pool import media_layout


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2_5_omni"}))
    return tmp_path


def test_a_number_is_the_memory_of_the_first_stage(model: Path) -> None:
    config = load_config(model, kv_pool=1 << 20)
    assert config.stage("thinker").pool == KVPoolConfig(memory_bytes=1 << 20)
    assert config.stage("talker").pool is None


def test_each_stage_that_writes_tokens_may_have_one(model: Path) -> None:
    stage = load_config(model, stage_overrides=["talker.kv_pool.disk=/var/cache/pages"]).stage("talker")
    assert stage.pool == KVPoolConfig(disk="/var/cache/pages")


def test_keys_may_be_given_one_by_one(model: Path) -> None:
    one_by_one = ["thinker.kv_pool.disk_bytes=4", "thinker.kv_pool.disk=/var/cache/pages"]
    assert load_config(model, stage_overrides=one_by_one).stage("thinker").pool == KVPoolConfig(
        disk="/var/cache/pages", disk_bytes=4
    )


def test_mistakes_are_named_with_what_is_valid(model: Path) -> None:
    for override, message in [
        ("thinker.kv_pool.memory=1", r"unknown key: did you mean 'memory_bytes'"),
        ("thinker.kv_pool.memory_bytes=-1", r"kv_pool.memory_bytes = -1: must be"),
        ("thinker.kv_pool.memory_bytes=0", r"memory_bytes = 0: without disk keeps no pages"),
        ("thinker.kv_pool.staging_bytes=0", r"kv_pool.staging_bytes = 0: must be above 0"),
        ("thinker.kv_pool.disk_bytes=4", r"kv_pool.disk_bytes = 4: has no effect without disk"),
        ("thinker.kv_pool.media_disk_bytes=4", r"media_disk_bytes = 4: has no effect without disk and media_bytes"),
        ("thinker.kv_pool.token_file=token", r"kv_pool.token_file = token: has no effect without redis"),
        ("token2wav.kv_pool.memory_bytes=4", r"'token2wav': kv_pool: only a stage with engine_type 'ar'"),
    ]:
        with pytest.raises(ConfigError, match=message):
            load_config(model, stage_overrides=[override])
    with pytest.raises(ConfigError, match="kv_pool: pages are named by the hashes of the prefix cache"):
        load_config(model, kv_pool=1, stage_overrides=["thinker.enable_prefix_caching=false"])


def of_redis(model: Path, url: str, **keys: object) -> KVPoolConfig | None:
    return load_config(model, kv_pool={"redis": url, **keys}).stages[0].pool


@pytest.mark.parametrize("url", ["redis://10.0.0.9:6379/0", "rediss://:word@redis.local", "unix:///run/redis.sock"])
def test_a_directory_of_several_hosts_is_named_by_its_url(model: Path, url: str) -> None:
    assert of_redis(model, url) == KVPoolConfig(redis=url)


@pytest.mark.parametrize("url", ["10.0.0.9:6379", "http://10.0.0.9", "redis://", "redis://[10.0.0.9", ""])
def test_what_is_no_url_of_redis_is_rejected(model: Path, url: str) -> None:
    with pytest.raises(ConfigError, match=r"kv_pool.redis = .*: must be a URL of Redis, such as redis://HOST:6379/0"):
        of_redis(model, url)


def test_other_hosts_read_pages_from_memory(model: Path) -> None:
    with pytest.raises(ConfigError, match=r"kv_pool.memory_bytes = 0: must be above 0 with redis"):
        of_redis(model, "unix:///redis.sock", memory_bytes=0, disk="/pages")


@pytest.mark.parametrize(
    "url", ["redis://u:hunter2@10.0.0.9:6379", "redis://:hunter/2@10.0.0.9", "redis://10.0.0.9?password=hunter2"]
)
def test_a_password_of_redis_is_in_no_message(model: Path, url: str) -> None:
    wrong = [
        {"kv_pool": {"redis": url, **keys}} for keys in ({"disk_bytes": -1}, {"memory_bytes": 0}, {"disk": 3}, {"x": 1})
    ]
    wrong += [{"kv_pool": {"redis": f"http{url}"}}, {"overrides": {"stages": {"thinker": {"kv_pool": url}}}}]
    wrong += [{"stage_overrides": [f"thinker.kv_pool.redis=x{url}"]}, {"stage_overrides": [f"thinker.redis={url}"]}]
    for arguments in wrong:
        with pytest.raises(ConfigError) as raised:
            load_config(model, **arguments)
        assert "hunter" not in str(raised.value) and "2@" not in str(raised.value)


@pytest.fixture
def create(tmp_path: Path) -> Callable[..., None]:
    model = llama.build(tmp_path / "model")

    def create(
        url: str = "redis://:hunter2@127.0.0.1:1/0", keys: Mapping[str, object] | None = None, **more: object
    ) -> None:
        pool = {"memory_bytes": 1 << 20, "redis": url, **(keys or {})}
        stage = load_config(model, kv_pool=pool, skip_tokenizer_init=True, **more).stages[0]
        create_vllm_config(stage, StageSpec("language", "", "text"))

    return create


def test_that_redis_is_away_prevents_no_start(create: Callable[..., None]) -> None:
    create()


def test_an_engine_needs_an_address_that_other_hosts_reach() -> None:
    pool = KVPoolConfig(memory_bytes=1 << 20, redis="redis://:hunter2@10.0.0.9:6379")
    with pytest.raises(ConfigError, match=r"'redis://10.0.0.9:6379': other hosts .* VLLM_OMNI_RELAY_HOST") as raised:
        check_address(pool, "127.0.0.1")
    assert "hunter2" not in str(raised.value)
    with pytest.raises(ConfigError, match=r"cannot listen at VLLM_OMNI_RELAY_HOST = '203.0.113.1'"):
        check_address(pool, "203.0.113.1")


def test_a_secret_is_checked_before_a_start(create: Callable[..., None], tmp_path: Path) -> None:
    file = tmp_path / "token"
    with pytest.raises(ConfigError, match=r"kv_pool.token_file: token file .*token: No such file"):
        create(keys={"token_file": str(file)})
    file.write_text("0" * 64)
    file.chmod(0o644)
    with pytest.raises(ConfigError, match=r"kv_pool.token_file: .*other users can read it: chmod 600"):
        create(keys={"token_file": str(file)})
    file.chmod(0o600)
    create(keys={"token_file": str(file)})


def test_a_port_that_is_none_is_rejected_before_a_start(create: Callable[..., None]) -> None:
    with pytest.raises(ConfigError, match=r"'redis://127.0.0.1:port' is no URL of Redis") as raised:
        create("redis://:hunter2@127.0.0.1:port")
    assert "hunter2" not in str(raised.value)


def test_names_of_pages_that_differ_in_each_process_are_rejected(create: Callable[..., None]) -> None:
    with pytest.raises(ConfigError, match="set prefix_caching_hash_algo to 'sha256' or 'sha256_cbor'"):
        create(prefix_caching_hash_algo="xxhash")


def test_a_missing_package_is_named(create: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("vllm_omni.kv.pool.hosts", "vllm_omni.kv.pool.directory.redis"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setitem(sys.modules, "redis", None)
    with pytest.raises(MissingDependency, match=r"needs redis; in the checkout of this project: pip install"):
        create()


def test_encoded_media_may_be_kept_without_pages(model: Path) -> None:
    media = ["thinker.kv_pool.media_bytes=1024"]
    pool = load_config(model, stage_overrides=[*media, "thinker.kv_pool.memory_bytes=0"]).stage("thinker").pool
    assert pool is not None and pool.keeps_media and not pool.keeps_pages
    load_config(model, kv_pool=0, stage_overrides=[*media, "thinker.enable_prefix_caching=false"])
    disk = ["thinker.kv_pool.disk=/var/cache/pages", "thinker.kv_pool.disk_bytes=0"]
    pool = load_config(model, kv_pool=0, stage_overrides=[*media, *disk]).stage("thinker").pool
    assert pool is not None and pool.keeps_media and not pool.keeps_pages
    with pytest.raises(ConfigError, match="disk_bytes = 0: must be above 0 with disk"):
        load_config(model, stage_overrides=disk)
    with pytest.raises(ConfigError, match="staging_bytes = 4: has no effect without memory_bytes or disk_bytes"):
        load_config(model, kv_pool=0, stage_overrides=[*media, "thinker.kv_pool.staging_bytes=4"])


def test_images_are_kept_in_one_place(model: Path) -> None:
    epd = {"instances": "E:1,PD:1", "image_cache_bytes": 0}
    load_config(model, epd=epd)
    with pytest.raises(ConfigError, match=r"epd\.image_cache_bytes: has no effect with kv_pool\.media_bytes"):
        load_config(model, epd=epd, kv_pool={"media_bytes": 1 << 20})


def test_only_a_model_with_an_encoder_keeps_media_and_only_with_synchronous_steps(tmp_path: Path) -> None:
    text, images = llama.build(tmp_path / "text"), llava.build(tmp_path / "images")

    def make(model: Path, **more: object) -> VllmConfig:
        stage = load_config(model, kv_pool={"memory_bytes": 0, "media_bytes": 1 << 20}, **more).stages[0]
        return create_vllm_config(stage, StageSpec("language", "", "text"))

    with pytest.raises(ConfigError, match=r"'language': kv_pool.media_bytes: this model reads no images"):
        make(text, skip_tokenizer_init=True)
    with pytest.raises(ConfigError, match=r"with kv_pool\.media_bytes a stage reports"):
        make(images, async_scheduling=True)
    made = make(images)
    assert made.kv_transfer_config is None
    assert made.additional_config[MEDIA_POOL]["memory_bytes"] == 1 << 20


def test_media_are_encoded_anew_by_other_weights_settings_and_processors(tmp_path: Path) -> None:
    model = llava.build(tmp_path / "model")

    def layout(model: Path, **more: object) -> str:
        stage = load_config(model, kv_pool={"media_bytes": 1 << 20}, **more).stages[0]
        made = create_vllm_config(stage, StageSpec("language", "", "text"))
        return media_layout(made, made.additional_config[MEDIA_POOL])

    first = layout(model)
    assert first == layout(model, max_num_seqs=3)
    assert first == layout(shutil.copytree(model, tmp_path / "copy")), "a path is not part of it"
    others = [
        layout(llava.build(tmp_path / "other", seed=5)),
        layout(model, dtype="float32"),
        layout(model, mm_processor_kwargs={"do_resize": False}),
        layout(model, hf_overrides={"projector_hidden_act": "relu"}),
    ]
    processor = model / "preprocessor_config.json"
    processor = processor if processor.exists() else model / "processor_config.json"
    processor.write_text(processor.read_text() + " ")
    others.append(layout(model))
    assert len({first, *others}) == 6


def test_a_connector_of_the_user_and_the_pool_exclude_each_other(tmp_path: Path) -> None:
    model = llama.build(tmp_path / "model")
    connector = {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}
    stage = load_config(model, kv_pool=1 << 20, kv_transfer_config=connector, skip_tokenizer_init=True).stages[0]
    with pytest.raises(ConfigError, match="kv_transfer_config: kv_pool sets it, too"):
        create_vllm_config(stage, StageSpec("language", "", "text"))


def test_weights_that_are_not_the_checkpoints_have_no_pool(tmp_path: Path) -> None:
    stage = load_config(
        llama.build(tmp_path / "model"), kv_pool=1 << 20, load_format="dummy", skip_tokenizer_init=True
    ).stages[0]
    with pytest.raises(ConfigError, match=r"kv_pool: .* named by the checkpoint's weights, .*'dummy'"):
        create_vllm_config(stage, StageSpec("language", "", "text"))


def test_pages_are_named_by_the_configuration_of_the_model_too(tmp_path: Path) -> None:
    model = llama.build(tmp_path / "model")

    def identity(**more: object) -> str:
        stage = load_config(model, kv_pool=1 << 20, skip_tokenizer_init=True, **more).stages[0]
        made = create_vllm_config(stage, StageSpec("language", "", "text")).kv_transfer_config
        assert made is not None
        named: str = made.kv_connector_extra_config["secondary_tiers"][0]["identity"]
        return named

    assert identity() == identity(max_num_seqs=3) != identity(hf_overrides={"rms_norm_eps": 0.1})


def test_pages_of_a_stage_that_keeps_rows_have_these_and_another_name(tmp_path: Path) -> None:
    model = llama.build(tmp_path / "model")
    spec = StageSpec("language", "", "text", publishing_fields=frozenset({"rows"}))

    def made(**more: object) -> tuple[int | None, str]:
        settings = {"kv_pool": {"memory_bytes": 1 << 20}, **more}
        config = create_vllm_config(load_config(model, skip_tokenizer_init=True, **settings).stages[0], spec)
        assert config.kv_transfer_config is not None
        extra = config.kv_transfer_config.kv_connector_extra_config
        return extra.get(ROW_BYTES), extra["secondary_tiers"][0]["identity"]

    num_bytes, identity = made(dtype="float32")
    without = made(dtype="float32", stage_overrides=["language.row_cache=false"])
    canonical = made(dtype="float32", kv_pool={"memory_bytes": 1 << 20, "canonical_layout": True})
    assert num_bytes == 4 * 128
    assert without == canonical and without[0] is None and without[1] != identity


def test_pages_that_are_handed_over_are_taken_before_those_of_the_pool() -> None:
    made = with_offloading({"kv_connector": "RelayKVConnector", "kv_role": "kv_consumer"}, KVPoolConfig(), "language")
    assert (made["kv_connector"], made["kv_role"]) == ("MultiConnector", "kv_consumer")
    names = [one["kv_connector"] for one in made["kv_connector_extra_config"]["connectors"]]
    assert names == ["RelayKVConnector", "OffloadingConnector"]
