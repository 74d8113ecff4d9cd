"""The first-block cache on tiny denoisers, against caches of one request at a time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from diffusers import FirstBlockCacheConfig, SD3Transformer2DModel, WanTransformer3DModel
from diffusers.hooks import apply_group_offloading
from torch import Tensor, nn

from tests.diffusion.other_caches import SlowCache, diffusers_cache
from tests.diffusion.tiny_denoisers import FAMILIES, Call, Family, Request, Row, denoise, kwargs_of
from vllm_omni.diffusion.first_block_cache import FirstBlockCache, RowKey, RowStep

PLENTY = 1 << 30
# Float noise: a batch of several rows multiplies matrices of other shapes than a batch of one.
TOLERANCE = 2e-6
# Three per family, from few hits to many, each well apart from the distances that occur.
THRESHOLDS = {
    "qwen_image": (0.35, 0.5, 0.7),
    "flux": (0.25, 0.4, 0.6),
    "wan": (0.08, 0.12, 0.2),
    "hunyuan_video": (0.33, 0.45, 0.6),
    "sd3": (0.35, 0.5, 0.7),
    "z_image": (0.6, 0.75, 1.0),
}


@pytest.fixture(scope="module", params=list(FAMILIES))
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def modules() -> dict[str, nn.Module]:
    """One denoiser of each family; no test changes them for good."""
    return {name: family.build() for name, family in FAMILIES.items()}


def make_cache(threshold: float = 0.0, **limits: Any) -> FirstBlockCache:
    """One that follows the formula alone, as the caches that it is compared with."""
    return FirstBlockCache(threshold, **{"num_warmup_steps": 0, "num_last_steps": 0, "max_reuses": None, **limits})


def make_requests(name: str) -> list[Request]:
    """Three that join one after another, with other thresholds, steps and texts."""
    few, some, many = THRESHOLDS[name]
    return [
        Request("few", seed=1, num_steps=8, threshold=few, first_tick=0, text_length=8),
        Request("some", seed=2, num_steps=10, threshold=some, first_tick=1, text_length=11),
        Request("many", seed=3, num_steps=6, threshold=many, first_tick=3, text_length=7),
    ]


def cached_call(cache: FirstBlockCache, family: Family, modules: Mapping[str, nn.Module]) -> Call:
    """All rows of a tick in one forward."""

    def call(component: str, rows: list[Row]) -> list[Tensor]:
        keys, steps = [row.key for row in rows], [row.step for row in rows]
        return list(cache.forward(modules[component], kwargs_of(family, rows), keys, steps)[0])

    return call


def plain_call(family: Family, modules: Mapping[str, nn.Module]) -> Call:
    def call(component: str, rows: list[Row]) -> list[Tensor]:
        with torch.no_grad():
            return list(modules[component](**kwargs_of(family, rows))[0])

    return call


def run_cached(
    cache: FirstBlockCache, family: Family, module: nn.Module, requests: list[Request], **options: Any
) -> dict[str, Tensor]:
    for request in requests:
        cache.grant(request.request_id, PLENTY, request.threshold)
    return denoise(family, requests, cached_call(cache, family, {"transformer": module}), **options)


def last_block(module: nn.Module) -> nn.Module:
    names = ("single_transformer_blocks", "transformer_blocks", "blocks", "layers")
    return next(getattr(module, name) for name in names if hasattr(module, name))[-1]


@contextmanager
def widths_of_last_block(*modules: nn.Module) -> Iterator[list[int]]:
    """How many rows the last block computes in each forward in which it runs."""
    widths: list[int] = []
    # Its attention, as diffusers' cache calls the block itself for nothing.
    attentions = [
        next(child for name, child in last_block(module).named_children() if name.startswith("att"))
        for module in modules
    ]

    def see(attention: nn.Module, args: Any, result: Tensor | tuple[Tensor, ...]) -> None:
        widths.append((result if isinstance(result, Tensor) else result[0]).shape[0])

    hooks = [attention.register_forward_hook(see) for attention in attentions]
    try:
        yield widths
    finally:
        for hook in hooks:
            hook.remove()


def largest_difference(left: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> float:
    assert left.keys() == right.keys()
    return max(float((left[key] - right[key]).abs().max()) for key in left)


# --- The same as a cache of one request at a time


@dataclass
class MixedForwards:
    """Counts the rows of each forward, and how many of them were reused."""

    cache: FirstBlockCache
    call: Call
    reused_of_rows: list[tuple[int, int]] = field(default_factory=list)

    def __call__(self, component: str, rows: list[Row]) -> list[Tensor]:
        before = self.cache.statistics().num_rows_reused
        result = self.call(component, rows)
        self.reused_of_rows.append((self.cache.statistics().num_rows_reused - before, len(rows)))
        return result

    @property
    def num_mixed(self) -> int:
        return sum(0 < num_reused < num_rows for num_reused, num_rows in self.reused_of_rows)


def run_mixed(
    name: str, modules: Mapping[str, nn.Module], requests: list[Request], family: Family | None = None, **options: Any
) -> tuple[dict[str, Tensor], FirstBlockCache]:
    """All requests in the same batches, of which some hold rows that are reused and rows that are not."""
    family = family or FAMILIES[name]
    cache = make_cache()
    for request in requests:
        cache.grant(request.request_id, PLENTY, request.threshold)
    forwards = MixedForwards(cache, cached_call(cache, family, modules))
    result = denoise(family, requests, forwards, **options)
    assert forwards.num_mixed >= 3, forwards.reused_of_rows
    return result, cache


@pytest.mark.parametrize("name", ["qwen_image", "flux", "wan", "hunyuan_video"])
def test_mixed_rows_equal_the_cache_of_diffusers_alone(name, modules):
    family, module, requests = FAMILIES[name], modules[name], make_requests(name)
    alone: dict[str, Tensor] = {}
    with widths_of_last_block(module) as widths_alone:
        for request in requests:
            with diffusers_cache(family, {"transformer": module}, request.threshold) as call:
                alone |= denoise(family, [request], call)
    with widths_of_last_block(module) as widths:
        together, cache = run_mixed(name, {"transformer": module}, requests)
    assert largest_difference(together, alone) <= TOLERANCE
    assert cache.statistics().num_rows_computed == sum(widths) == sum(widths_alone)


@pytest.mark.parametrize(("name", "hidden_index"), [("sd3", 1), ("z_image", None)])
def test_mixed_rows_equal_a_plain_implementation_of_the_formula(name, hidden_index, modules):
    family, module, requests = FAMILIES[name], modules[name], make_requests(name)
    slow = {request.request_id: SlowCache(family, module, request.threshold, hidden_index) for request in requests}
    alone: dict[str, Tensor] = {}
    for request in requests:
        alone |= denoise(family, [request], slow[request.request_id])
    together, cache = run_mixed(name, {"transformer": module}, requests)
    assert largest_difference(together, alone) <= TOLERANCE
    assert cache.statistics().num_rows_reused == sum(state.num_hits for state in slow.values())


def test_both_experts_of_wan_equal_the_cache_of_diffusers_alone(modules):
    family, requests = FAMILIES["wan"], make_requests("wan")
    experts = {"transformer": modules["wan"], "transformer_2": family.build(seed=1)}
    alone: dict[str, Tensor] = {}
    with widths_of_last_block(*experts.values()) as widths_alone:
        for request in requests:
            with diffusers_cache(family, experts, request.threshold) as call:
                alone |= denoise(family, [request], call, switch_at=0.5)
    with widths_of_last_block(*experts.values()) as widths:
        together, cache = run_mixed("wan", experts, requests, switch_at=0.5)
    assert largest_difference(together, alone) <= TOLERANCE
    assert cache.statistics().num_rows_computed == sum(widths) == sum(widths_alone)


def test_rows_of_other_lengths_share_a_batch_of_z_image(modules):
    family, module = FAMILIES["z_image"], modules["z_image"]
    requests = [
        Request("small", seed=1, num_steps=8, threshold=0.6, text_length=8),
        Request("wide", seed=2, num_steps=6, threshold=0.9, first_tick=2, shape=(4, 1, 8, 24)),
        Request("wordy", seed=3, num_steps=5, threshold=0.75, first_tick=1, text_length=40),
    ]
    slow = {request.request_id: SlowCache(family, module, request.threshold, None) for request in requests}
    alone: dict[str, Tensor] = {}
    for request in requests:
        alone |= denoise(family, [request], slow[request.request_id])
    together, cache = run_mixed("z_image", {"transformer": module}, requests)
    assert largest_difference(together, alone) <= TOLERANCE
    assert cache.statistics().num_rows_reused == sum(state.num_hits for state in slow.values())
    # 2 branches, 2 tensors, 32 float32 each: 32 tokens of image and 32 of text; 64 and 32; 32 and 64.
    assert [cache.num_bytes(request.request_id) for request in requests] == [
        4 * tokens * 32 * 4 for tokens in (64, 96, 96)
    ]


def with_reference_image(latents: list[Tensor], texts: list[Tensor], sigmas: Tensor) -> dict[str, Any]:
    """Calls of Qwen-Image-Edit: the last 8 tokens are an image to start from, whose timestep is 0."""
    kwargs = FAMILIES["qwen_image"].make_kwargs(latents, texts, sigmas)
    return {**kwargs, "img_shapes": [[(1, 4, 4), (1, 4, 2)]] * len(latents)}


def with_timesteps_of_tokens(latents: list[Tensor], texts: list[Tensor], sigmas: Tensor) -> dict[str, Any]:
    """Calls of Wan2.2 5B: the first frame's tokens are an image to start from, whose timestep is 0."""
    kwargs = FAMILIES["wan"].make_kwargs(latents, texts, sigmas)
    return {**kwargs, "timestep": kwargs["timestep"][:, None] * (torch.arange(32) >= 16)}


VARIANTS = {
    "two timesteps per row, in the batch's dimension": replace(
        FAMILIES["qwen_image"],
        config={**FAMILIES["qwen_image"].config, "zero_cond_t": True},
        latent_shape=(24, 16),
        make_kwargs=with_reference_image,
    ),
    "a timestep for each token": replace(FAMILIES["wan"], make_kwargs=with_timesteps_of_tokens),
    "a first frame with its own embedding": replace(
        FAMILIES["hunyuan_video"],
        config={**FAMILIES["hunyuan_video"].config, "image_condition_type": "token_replace"},
    ),
}


@pytest.mark.parametrize("variant", list(VARIANTS))
def test_variants_with_other_arguments_of_their_blocks_equal_the_cache_of_diffusers(variant):
    family = VARIANTS[variant]
    base = next(name for name in FAMILIES if FAMILIES[name].class_name == family.class_name)
    module, requests = family.build(), make_requests(base)
    alone: dict[str, Tensor] = {}
    for request in requests:
        with diffusers_cache(family, {"transformer": module}, request.threshold) as call:
            alone |= denoise(family, [request], call)
    together, _ = run_mixed(base, {"transformer": module}, requests, family)
    assert largest_difference(together, alone) <= TOLERANCE


# --- Requests do not touch each other


def test_dropping_a_request_does_not_change_the_others(name, modules):
    family, module, requests = FAMILIES[name], modules[name], make_requests(name)
    kept = [request for request in requests if request.request_id != "some"]
    alone: dict[str, Tensor] = {}
    for request in kept:
        alone |= run_cached(make_cache(), family, module, [request])
    cache = make_cache()
    num_entries: list[int] = []

    def drop_one(tick: int) -> None:
        if tick == 6:
            num_entries.append(cache.statistics().num_entries)
            cache.drop("some")
            num_entries.append(cache.statistics().num_entries)

    together = run_cached(cache, family, module, requests, on_tick=drop_one)
    assert (
        largest_difference({request.request_id: together[request.request_id] for request in kept}, alone) <= TOLERANCE
    )
    assert num_entries == [6, 4]  # two branches each


def test_no_entry_is_left_after_the_last_request(name, modules):
    family, module, requests = FAMILIES[name], modules[name], make_requests(name)
    tree = dict(module.named_modules())
    cache = make_cache()
    run_cached(cache, family, module, requests)
    full = cache.statistics()
    assert (full.num_requests, full.num_entries) == (3, 6)
    assert full.num_bytes == sum(cache.num_bytes(request.request_id) for request in requests)
    for request in requests:
        cache.drop(request.request_id)
    assert cache.statistics()[:3] == (0, 0, 0)
    assert [cache.num_bytes(request.request_id) for request in requests] == [0, 0, 0]
    assert dict(module.named_modules()) == tree
    assert not [attribute for attribute in vars(module) if "blocks" in attribute or attribute == "layers"]


# --- What is always safe


@pytest.mark.parametrize("is_granted", [True, False], ids=["threshold 0", "not granted"])
def test_an_uncached_request_equals_a_plain_forward_to_the_bit(is_granted, name, modules):
    family, module, requests = FAMILIES[name], modules[name], make_requests(name)
    cache = make_cache(threshold=0.5)
    for request in requests:
        if is_granted:
            cache.grant(request.request_id, PLENTY, threshold=0)
    modules_by_name = {"transformer": module}
    cached = denoise(family, requests, cached_call(cache, family, modules_by_name))
    plain = denoise(family, requests, plain_call(family, modules_by_name))
    assert largest_difference(cached, plain) == 0
    assert cache.statistics().num_entries == 0
    assert cache.statistics().num_rows_reused == 0


def test_rows_that_all_miss_equal_a_plain_forward_to_the_bit(name, modules):
    family, module, requests = FAMILIES[name], modules[name], make_requests(name)
    requests = [replace(request, threshold=1e-9) for request in requests]
    cached = run_cached(make_cache(), family, module, requests)
    assert largest_difference(cached, denoise(family, requests, plain_call(family, {"transformer": module}))) == 0


def test_rows_without_a_key_are_not_cached(modules):
    family, module = FAMILIES["wan"], modules["wan"]
    cache = make_cache(threshold=100.0)
    cache.grant("a", PLENTY)
    rows = [Row(RowKey("a", "transformer", "cond", row), RowStep(0, 4), *inputs(row), 0.5) for row in range(3)]
    for step in range(2):
        with widths_of_last_block(module) as widths:
            steps = [RowStep(step, 4)] * 3
            cache.forward(module, kwargs_of(family, rows), [rows[0].key, None, rows[2].key], steps)
    assert widths == [1]
    assert cache.statistics() == (1, 2, cache.num_bytes("a"), 2, 2)


def inputs(seed: int) -> tuple[Tensor, Tensor]:
    """Latents and text of a row of Wan."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(FAMILIES["wan"].latent_shape, generator=generator), torch.randn(6, 32, generator=generator)


def test_losing_an_entry_costs_one_full_forward(modules):
    family, module = FAMILIES["wan"], modules["wan"]
    request = Request("a", seed=1, num_steps=8, threshold=100.0)
    cache = make_cache()

    def lose(tick: int) -> None:
        if tick == 4:
            cache.drop("a")
            cache.grant("a", PLENTY, request.threshold)

    with widths_of_last_block(module) as widths:
        result = run_cached(cache, family, module, [request], on_tick=lose)
    assert widths == [2, 2]  # the first step, and the one after the loss
    assert result["a"].isfinite().all()


def test_entries_of_the_first_expert_are_freed_when_the_second_is_called(modules):
    family = FAMILIES["wan"]
    experts = {"transformer": modules["wan"], "transformer_2": family.build(seed=1)}
    cache = make_cache()
    cache.grant("a", PLENTY, threshold=100.0)
    components: list[set[str]] = []

    def see(component: str, rows: list[Row]) -> list[Tensor]:
        result = cached_call(cache, family, experts)(component, rows)
        components.append({key.component for key in cache._requests["a"].entries})
        assert cache.statistics().num_bytes == cache.num_bytes("a")
        return result

    denoise(family, [Request("a", seed=1, num_steps=4)], see, switch_at=0.5)
    assert components == [{"transformer"}] * 2 + [{"transformer_2"}] * 2


def test_a_component_can_be_dropped_by_name(modules):
    family, module = FAMILIES["wan"], modules["wan"]
    cache = make_cache()
    run_cached(cache, family, module, [Request("a", seed=1, num_steps=2, threshold=0.1)])
    cache.drop("a", "transformer_2")
    assert cache.statistics().num_entries == 2
    cache.drop("a", "transformer")
    assert cache.statistics()[:2] == (1, 0)


def test_a_failed_forward_leaves_the_module_whole_and_loses_only_entries(modules):
    family, module = FAMILIES["wan"], modules["wan"]
    cache = make_cache()
    request = Request("a", seed=1, num_steps=3, threshold=1e-9)
    expected = run_cached(cache, family, module, [request])

    def fail(block: nn.Module, args: Any) -> None:
        raise RuntimeError("out of memory")

    hook = module.blocks[1].register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="out of memory"):
        run_cached(cache, family, module, [request])
    hook.remove()
    assert cache.statistics().num_entries == 0
    assert isinstance(module.blocks, nn.ModuleList)
    assert largest_difference(run_cached(cache, family, module, [request]), expected) == 0


# --- When a row is computed all the same


def widths_of_a_run(modules: Mapping[str, nn.Module], num_steps: int, **limits: Any) -> list[int]:
    """Run one request whose steps are always similar enough to reuse; a computed step has 2 rows."""
    family, module = FAMILIES["wan"], modules["wan"]
    steps: list[int] = []
    cache = make_cache(**limits)
    with widths_of_last_block(module) as widths:
        run_cached(
            cache,
            family,
            module,
            [Request("a", seed=1, num_steps=num_steps, threshold=100.0)],
            on_tick=lambda tick: steps.append(len(widths)),
        )
        steps.append(len(widths))
    return [after - before for before, after in pairwise(steps)]


@pytest.mark.parametrize(
    ("limits", "computed"),
    [
        ({}, [1, 0, 0, 0, 0, 0, 0, 0]),
        ({"num_warmup_steps": 3}, [1, 1, 1, 0, 0, 0, 0, 0]),
        ({"num_last_steps": 2}, [1, 0, 0, 0, 0, 0, 1, 1]),
        ({"max_reuses": 2}, [1, 0, 0, 1, 0, 0, 1, 0]),
        ({"max_reuses": 0}, [1, 1, 1, 1, 1, 1, 1, 1]),
    ],
    ids=str,
)
def test_steps_that_are_always_computed(limits, computed, modules):
    assert widths_of_a_run(modules, 8, **limits) == computed


def test_without_the_number_of_steps_no_step_is_the_last(modules):
    family, module = FAMILIES["wan"], modules["wan"]
    cache = make_cache(threshold=100.0, num_last_steps=1)
    cache.grant("a", PLENTY)
    key = RowKey("a", "transformer", "cond", 0)
    for step in range(3):
        row = Row(key, RowStep(step, 0), *inputs(0), 0.5)
        cache.forward(module, kwargs_of(family, [row]), [key], [row.step])
    assert cache.statistics()[3:] == (1, 2)


# --- Room


def test_entries_stay_within_the_bytes_granted(modules):
    family, module = FAMILIES["wan"], modules["wan"]
    cache = make_cache()
    request = Request("a", seed=1, num_steps=4, threshold=100.0)
    run_cached(cache, family, module, [request])
    needed = cache.num_bytes("a")
    # 2 branches, 2 tensors, 2 frames of 4 x 4 tokens, 32 float32 each.
    assert needed == 2 * 2 * 32 * 32 * 4
    cache.grant("a", needed - 1, threshold=100.0)
    assert cache.statistics().num_entries == 0
    with widths_of_last_block(module) as widths:
        denoise(family, [request], cached_call(cache, family, {"transformer": module}))
    assert cache.statistics().num_bytes == needed // 2
    assert cache.num_bytes("a") == needed
    assert widths == [2, 1, 1, 1]  # one branch is cached, the other is not


def test_the_size_of_entries_is_known_before_a_grant(name, modules):
    family, module = FAMILIES[name], modules[name]
    cache = make_cache()
    request = Request("a", seed=1, num_steps=1, threshold=0.5)
    denoise(family, [request], cached_call(cache, family, {"transformer": module}))
    needed = cache.num_bytes("a")
    run_cached(cache, family, module, [request])
    assert cache.statistics().num_bytes == needed > 0


def test_an_entry_is_not_a_view_of_the_batch(modules):
    family, module = FAMILIES["wan"], modules["wan"]
    cache = make_cache()
    run_cached(cache, family, module, make_requests("wan"))
    for request in cache._requests.values():
        for entry in request.entries.values():
            for tensor in (entry.head_residual, entry.tail_residual):
                assert tensor.untyped_storage().nbytes() == tensor.nbytes


# --- What is supported


def test_the_six_families_are_supported(name, modules):
    assert make_cache().supports(modules[name])


def test_other_modules_are_not_supported_and_run_plainly():
    module = nn.Linear(4, 4)
    cache = make_cache(threshold=100.0)
    cache.grant("a", PLENTY)
    x = torch.ones(2, 4)
    keys = [RowKey("a", "transformer", "cond", row) for row in range(2)]
    assert not cache.supports(module)
    assert torch.equal(cache.forward(module, {"input": x}, keys, [RowStep(1, 4)] * 2), module(x))


def test_a_class_of_the_same_name_from_elsewhere_is_not_supported():
    elsewhere = type("WanTransformer3DModel", (WanTransformer3DModel,), {"__module__": "somewhere"})
    assert not make_cache().supports(elsewhere(**FAMILIES["wan"].config))


def test_a_module_with_a_cache_of_diffusers_is_not_supported():
    module = FAMILIES["wan"].build()
    module.enable_cache(FirstBlockCacheConfig(threshold=0.1))
    assert not make_cache().supports(module)


def test_a_module_that_is_offloaded_by_groups_is_not_supported():
    module = FAMILIES["wan"].build()
    apply_group_offloading(
        module, onload_device=torch.device("cpu"), offload_type="block_level", num_blocks_per_group=1
    )
    assert not make_cache().supports(module)


def test_a_compiled_module_is_not_supported():
    module = FAMILIES["wan"].build()
    module.compile()
    assert not make_cache().supports(module)


@pytest.mark.parametrize("change", [pytest.param("compiled blocks", marks=pytest.mark.long), "layerwise casting"])
def test_wrapped_blocks_are_skipped_too(change):
    family, requests = FAMILIES["wan"], make_requests("wan")
    module = family.build()
    if change == "compiled blocks":
        for block in module.blocks:
            block.compile(backend="eager")  # the tracing is torch.compile's, the code is not
    else:
        module.enable_layerwise_casting(storage_dtype=torch.bfloat16, compute_dtype=torch.float32)
    expected = {}
    for request in requests:
        expected |= denoise(family, [request], SlowCache(family, module, request.threshold, None))
    together, _ = run_mixed("wan", {"transformer": module}, requests)
    assert largest_difference(together, expected) <= TOLERANCE


def test_a_single_block_is_not_supported():
    module = SD3Transformer2DModel(**{**FAMILIES["sd3"].config, "num_layers": 1})
    assert not make_cache().supports(module)


def test_a_call_with_a_control_net_runs_plainly(modules):
    family, module = FAMILIES["sd3"], modules["sd3"]
    cache = make_cache(threshold=100.0)
    cache.grant("a", PLENTY)
    generator = torch.Generator().manual_seed(0)
    latents, text = torch.randn(family.latent_shape, generator=generator), torch.randn(8, 32, generator=generator)
    key = RowKey("a", "transformer", "cond", 0)
    kwargs = kwargs_of(family, [Row(key, RowStep(0, 4), latents, text, 0.5)])
    controlled = {**kwargs, "block_controlnet_hidden_states": [torch.ones(1, 16, 32)]}
    with torch.no_grad():
        expected = module(**controlled)[0]
    for step in range(2):
        assert torch.equal(cache.forward(module, controlled, [key], [RowStep(step, 4)])[0], expected)
    assert cache.statistics().num_entries == 0


@pytest.mark.parametrize(
    "arguments",
    [{"threshold": -0.1}, {"threshold": float("nan")}, {"threshold": 0.1, "num_last_steps": -1}],
    ids=str,
)
def test_invalid_limits_are_rejected(arguments):
    with pytest.raises(ValueError):
        FirstBlockCache(**arguments)
    with pytest.raises(ValueError):
        make_cache().grant("a", PLENTY, threshold=-1.0)
