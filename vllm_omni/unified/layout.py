"""``Layout``: how a model lays out images among the tokens of its sequences."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

IMAGE_LAYOUT = "image_layout"
"""Set in the configuration of a model that denoises pictures: the name of its layout. Without it: ``marked``."""


class Piece(NamedTuple):
    """Consecutive tokens of a step that attend in one way."""

    num_tokens: int
    is_causal: bool


class Layout(NamedTuple):
    """A canvas is latents behind one token, and in front of ``num_behind``.

    Attributes:
        shares_position: whether all tokens of an image have one rope position; else positions have two axes, and
            latents stand on a grid (``spans.grid_positions``).
        is_led_causally: whether the token in front of latents sees only those before it; else it is one of the image.
        noise_by_channel: whether the noise of a picture is drawn channel by channel, rather than token by token.
    """

    shares_position: bool
    is_led_causally: bool
    num_behind: int
    noise_by_channel: bool

    @property
    def num_markers(self) -> int:
        """The tokens of a canvas beside its latents."""
        return 1 + self.num_behind

    def canvas_pieces(self, num_tokens: int) -> Iterator[Piece]:
        """How the tokens of a canvas attend."""
        if self.is_led_causally:
            yield Piece(1, True)
        yield Piece(num_tokens - self.is_led_causally, False)


MARKED = Layout(shares_position=True, is_led_causally=False, num_behind=1, noise_by_channel=False)
"""Images between two markers, which see them and share their position: BAGEL."""

GRID = Layout(shares_position=False, is_led_causally=True, num_behind=0, noise_by_channel=True)
"""Images behind a token of the time: HunyuanImage-3. No latent sees what stands behind the image, so that a canvas ends
with them."""

LAYOUTS = {"marked": MARKED, "grid": GRID}


def layout_of(hf_config: Any) -> Layout:
    """The layout of a model that denoises pictures."""
    return LAYOUTS[getattr(hf_config, IMAGE_LAYOUT, "marked")]
