"""What a HunyuanImage-3 checkpoint says of its layers and pictures, and what only its published code says."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any

from transformers import PreTrainedConfig

MODEL_TYPE = "hunyuan_image_3_moe"
CHECKPOINT_ARCHITECTURE = "HunyuanImage3ForCausalMM"

BOS, EOS = "<|startoftext|>", "<|endoftext|>"
IMAGE_START, IMAGE_END = "<boi>", "<eoi>"
IMAGE, SEPARATOR = "<img>", "<joint_img_sep>"
TIMESTEP, MASK = "<timestep>", "<cfg>"
THINK, RECAPTION, RECAPTION_END = "<think>", "<recaption>", "</recaption>"
ANSWER, ANSWER_END = "<answer>", "</answer>"

DEFAULT_THETA = 10000.0  # of the rope
AXES = [0, 1, 1]  # for vLLM, whose M-RoPE has three axes: the model reads two, and shares of frequencies are its own

PIXELS_PER_TOKEN = 16  # in each direction
NUM_STEPS_BETWEEN = 16  # sizes between a square and the longest picture


class HunyuanImage3Config(PreTrainedConfig):
    """The checkpoints' config.json, which transformers does not know. Sections are kept as they stand in the file."""

    model_type = MODEL_TYPE

    rope_parameters: dict[str, Any] | None = None

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        # The file's ``rope_scaling`` has a type that only the published code knows (``AXES``).
        given = {**config_dict}
        given.pop("rope_scaling", None)
        rope = {"rope_type": "default", "rope_theta": float(given.pop("rope_theta", DEFAULT_THETA))}
        return super().from_dict({**given, "rope_parameters": rope}, **kwargs)


class HunyuanConfig(HunyuanImage3Config):
    """Likewise, with the name that the published class gives itself."""

    model_type = "Hunyuan"


def of_layer(setting: int | list[int], index: int) -> int:
    """A setting that the configuration has once, or for each layer."""
    return setting[index] if isinstance(setting, list) else setting


class Sizes:
    """The sizes of pictures, by the token that stands for their shape, ``<img_ratio_i>``: from wide to tall.

    Args:
        base: the side of a square in pixels, as the configuration has it.
    """

    def __init__(self, base: int) -> None:
        self.base = base

    @cached_property
    def all(self) -> list[tuple[int, int]]:
        """Height and width in pixels."""
        shortest, longest, step = self.base // 2, 2 * self.base, self.base // NUM_STEPS_BETWEEN

        def side(index: int) -> int:
            return min(max(self.base + step * index, shortest), longest)

        return [(side(one), side(-one)) for one in range(-NUM_STEPS_BETWEEN, NUM_STEPS_BETWEEN + 1)]

    @property
    def grids(self) -> list[tuple[int, int]]:
        """Rows and columns of tokens."""
        return [(height // PIXELS_PER_TOKEN, width // PIXELS_PER_TOKEN) for height, width in self.all]

    @property
    def square(self) -> int:
        """The index of the square."""
        return NUM_STEPS_BETWEEN

    def nearest(self, height: int, width: int) -> int:
        """The index of the shape nearest to a size's own."""
        return min(range(len(self.all)), key=lambda one: abs(self.all[one][0] / self.all[one][1] - height / width))


class TokenIds:
    """Ids of the tokens that mark images and texts.

    Raises:
        KeyError: the vocabulary has no such token.
    """

    def __init__(self, vocabulary: Mapping[str, int], base: int) -> None:
        self.bos, self.eos = vocabulary[BOS], vocabulary[EOS]
        self.image_start, self.image_end = vocabulary[IMAGE_START], vocabulary[IMAGE_END]
        self.image, self.separator = vocabulary[IMAGE], vocabulary[SEPARATOR]
        self.timestep, self.mask = vocabulary[TIMESTEP], vocabulary[MASK]
        self.think, self.recaption = vocabulary[THINK], vocabulary[RECAPTION]
        self.recaption_end = vocabulary[RECAPTION_END]
        self.answer, self.answer_end = vocabulary[ANSWER], vocabulary[ANSWER_END]
        self.size = vocabulary[f"<img_size_{base}>"]
        self.first_ratio = vocabulary["<img_ratio_0>"]
