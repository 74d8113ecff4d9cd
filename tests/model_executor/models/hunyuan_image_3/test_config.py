"""Sizes of pictures as in the reference, and a checkpoint's configuration."""

from types import SimpleNamespace

from tests.cases import case
from tests.reference.hunyuan_image_3 import Reference
from vllm_omni.model_executor.models.hunyuan_image_3.config import HunyuanImage3Config, Sizes, of_layer


def test_sizes_are_the_references() -> None:
    for base in (64, 80, 1024):
        model, sizes = SimpleNamespace(base_size=base), Sizes(base)
        expected = [Reference.size_of(model, ratio) for ratio in range(33)]  # type: ignore[arg-type]
        assert sizes.all == expected
        assert sizes.all[sizes.square] == (base, base)
        for height, width in ((1, 1), (48, 80), (1000, 90), (61, 50), *expected):
            with case(base, height, width):
                nearest = min(abs(one / two - height / width) for one, two in expected)
                one, two = sizes.all[sizes.nearest(height, width)]
                assert abs(one / two - height / width) == nearest


def test_sizes_of_the_published_base_are_multiples_of_a_token() -> None:
    assert all(side % 16 == 0 for size in Sizes(1024).all for side in size)
    assert Sizes(1024).grids[0] == (32, 128)


def test_the_type_of_the_rope_is_left_out() -> None:
    config = HunyuanImage3Config.from_dict({"rope_theta": 500.0, "rope_scaling": {"type": "custom"}, "hidden_size": 8})
    assert config.rope_parameters == {"rope_type": "default", "rope_theta": 500.0}
    assert config.hidden_size == 8


def test_a_setting_may_be_of_all_layers() -> None:
    assert (of_layer([3, 4], 1), of_layer(5, 1)) == (4, 5)
