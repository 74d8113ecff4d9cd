"""Dividing a device's memory between stages, on a device that only counts."""

import random
from collections.abc import Sequence

import pytest
from msgspec.structs import replace

from vllm_omni.process.memory import Device, DevicePlan, DoesNotFit, StageMemory, divide, format_bytes

GIB = 1 << 30


def make_device(num_bytes: int, *, is_host: bool = False) -> Device:
    return Device(name="cuda:0", total=num_bytes, free=num_bytes, is_host=is_host)


def make_stage(stage: str, weights: int = 0, cache_min: int = 0, cache_max: int = 0, **more: object) -> StageMemory:
    needs = {"activations": 0, "max_model_len": 4096, "max_num_seqs": 16, **more}
    return StageMemory(stage=stage, weights=weights, cache_min=cache_min, cache_max=cache_max, **needs)  # type: ignore[arg-type]


QWEN_OMNI = [
    make_stage("thinker", 17 * GIB, GIB, 100 * GIB, activations=GIB, dtype="bfloat16"),
    make_stage("talker", 2 * GIB, GIB // 2, 50 * GIB, activations=GIB, dtype="bfloat16"),
    make_stage("token2wav", 2 * GIB, activations=GIB // 2),
]


def check(device: Device, plan: DevicePlan) -> None:
    """What must hold of every plan."""
    assert plan.planned <= device.free
    for stage in plan.stages:
        if stage.cache is not None:
            assert plan.caches[stage.stage] == stage.cache
        elif stage.cache_max:
            assert stage.cache_min <= plan.caches[stage.stage] <= stage.cache_max
        else:
            assert stage.stage not in plan.caches


def test_caches_are_in_proportion_to_what_the_stages_could_use() -> None:
    device = make_device(80 * GIB)
    plan = divide(device, QWEN_OMNI, are_loaded=False)
    check(device, plan)
    assert plan.caches["thinker"] == pytest.approx(2 * plan.caches["talker"], abs=2)
    room = int(80 * GIB * 0.92) - 23.5 * GIB
    assert sum(plan.caches.values()) == pytest.approx(room, abs=2)


def test_a_stage_gets_its_minimum_before_the_others_get_more() -> None:
    stages = [make_stage("large", cache_min=GIB, cache_max=1000 * GIB), make_stage("small", 0, 2 * GIB, 2 * GIB)]
    device = make_device(10 * GIB)
    plan = divide(device, stages, are_loaded=False)
    check(device, plan)
    assert plan.caches["small"] == 2 * GIB
    assert plan.caches["large"] == device.room([], are_loaded=False) - 2 * GIB


def test_no_stage_gets_more_than_it_could_use() -> None:
    stages = [make_stage("thinker", GIB, 1000, 5000), make_stage("talker", GIB, 1000, 3000)]
    assert divide(make_device(80 * GIB), stages, are_loaded=False).caches == {"thinker": 5000, "talker": 3000}


def test_a_configured_cache_is_taken_off_first() -> None:
    stages = [*QWEN_OMNI[1:], make_stage("thinker", 17 * GIB, GIB, 100 * GIB, cache=20 * GIB)]
    device = make_device(80 * GIB)
    plan = divide(device, stages, are_loaded=False)
    check(device, plan)
    assert plan.caches["thinker"] == 20 * GIB
    assert plan.caches["talker"] == device.room(stages, are_loaded=False) - 20 * GIB


def test_loaded_weights_are_no_longer_in_the_free_memory() -> None:
    before = make_device(80 * GIB)
    after = Device(name="cuda:0", total=80 * GIB, free=80 * GIB - sum(stage.weights for stage in QWEN_OMNI))
    assert divide(before, QWEN_OMNI, are_loaded=False) == divide(after, QWEN_OMNI, are_loaded=True)


def test_half_of_what_is_left_on_a_host_stays_free() -> None:
    device = make_device(64 * GIB, is_host=True)
    plan = divide(device, QWEN_OMNI, are_loaded=False)
    assert sum(plan.caches.values()) == pytest.approx((64 - 23.5) * GIB / 2, abs=2)


def draw(generator: random.Random) -> tuple[Device, list[StageMemory]]:
    stages = []
    for number in range(generator.randint(1, 6)):
        smallest = generator.choice([0, generator.randint(1, 1 << 20)])
        largest = smallest * generator.randint(1, 1000)
        cache = generator.choice([None, None, generator.randint(smallest, 1 << 22)]) if smallest else None
        loads = {"weights": generator.randint(0, 1 << 22), "activations": generator.randint(0, 1 << 20)}
        stages.append(make_stage(f"s{number}", cache_min=smallest, cache_max=largest, cache=cache, **loads))
    return make_device(generator.randint(1, 1 << 25), is_host=generator.random() < 0.5), stages


def test_no_plan_exceeds_its_device_and_the_order_has_no_effect() -> None:
    generator, num_plans = random.Random(0), 0
    for _ in range(3000):
        device, stages = draw(generator)
        shuffled = generator.sample(stages, len(stages))
        try:
            plan = divide(device, stages, are_loaded=False)
        except DoesNotFit as exc:
            least = sum(stage.cache_min if stage.cache is None else stage.cache for stage in stages)
            assert least > device.room(stages, are_loaded=False)
            with pytest.raises(DoesNotFit) as other:
                divide(device, shuffled, are_loaded=False)
            assert str(other.value) == str(exc)
            continue
        check(device, plan)
        assert divide(device, shuffled, are_loaded=False) == plan
        num_plans += 1
    assert 500 < num_plans < 2500


# -- what does not fit


def rejected(num_bytes: int, stages: Sequence[StageMemory], *, is_host: bool = False) -> str:
    with pytest.raises(DoesNotFit) as info:
        divide(make_device(num_bytes, is_host=is_host), stages, are_loaded=False)
    return str(info.value)


def test_too_little_for_a_cache_is_rejected_with_the_numbers_and_a_length_that_fits() -> None:
    message = rejected(27 * GIB, QWEN_OMNI)
    assert "device cuda:0: 163.8 MiB of memory are missing" in message
    assert "thinker: weights 17.0 GiB, activations 1.0 GiB, cache 1.0 GiB at least" in message
    assert "27.0 GiB free of 27.0 GiB" in message
    assert message.endswith("give thinker.max_model_len=3328")
    shorter = make_stage("thinker", 17 * GIB, GIB * 3328 // 4096, 100 * GIB, activations=GIB)
    divide(make_device(27 * GIB), [shorter, *QWEN_OMNI[1:]], are_loaded=False)


def test_shorter_requests_of_all_stages_are_suggested_where_one_is_not_enough() -> None:
    message = rejected(26 * GIB, QWEN_OMNI)  # about 1.1 GiB are missing
    assert message.endswith("give all stages --max-model-len=1024")
    shorter = [replace(one, cache_min=one.cache_min // 4) for one in QWEN_OMNI]
    divide(make_device(26 * GIB), shorter, are_loaded=False)


def test_fewer_requests_are_suggested_where_no_length_fits() -> None:
    stage = make_stage("thinker", GIB, 1 << 20, GIB, activations=GIB, activations_per_seq=GIB // 16)
    assert rejected(2 * GIB, [stage]).endswith("give thinker.max_num_seqs=13")


def test_smaller_weights_are_suggested_where_no_cache_is_small_enough() -> None:
    for dtype, change in (("float32", "dtype=bfloat16"), ("bfloat16", "quantization=fp8")):
        stage = make_stage("thinker", 16 * GIB, 1 << 20, GIB, dtype=dtype)
        assert rejected(12 * GIB, [stage]).endswith(f"give thinker.{change}")


def test_another_device_is_suggested_where_nothing_else_helps() -> None:
    stages = [make_stage("talker", 2 * GIB), make_stage("thinker", 16 * GIB)]
    assert rejected(12 * GIB, stages).endswith("give thinker another device (device_ids)")
    assert rejected(1 * GIB, stages).endswith("give some stages another device (device_ids), or use a larger one")


def test_a_configured_cache_that_is_too_large_or_too_small_is_rejected() -> None:
    too_large = make_stage("thinker", GIB, GIB, 100 * GIB, cache=20 * GIB)
    message = rejected(20 * GIB, [too_large])
    assert "cache 1.0 GiB at least, 20.0 GiB by its configuration" in message
    assert message.endswith("give thinker 2.6 GiB less (kv_cache_memory_bytes)")
    too_small = make_stage("thinker", GIB, 2 * GIB, 100 * GIB, cache=GIB)
    more = "give thinker 1.0 GiB more (gpu_memory_utilization, kv_cache_memory_bytes)"
    assert rejected(20 * GIB, [too_small]).endswith(more)
    assert rejected(3 * GIB, [too_small]).endswith("give thinker.max_model_len=2048")


def test_sizes_are_printed_with_the_largest_unit_below_them() -> None:
    assert [format_bytes(size) for size in (0, 1023, 1536, 5 << 20, 3 << 29)] == [
        "0 B",
        "1023 B",
        "1.5 KiB",
        "5.0 MiB",
        "1.5 GiB",
    ]
