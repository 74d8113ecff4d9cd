"""Canvases and images of both layouts."""

import pytest
import torch
from transformers import PreTrainedConfig
from vllm.multimodal.inputs import PlaceholderRange

from tests.reference.test_hunyuan_image_3 import FLOWS, GOLDEN, PICTURES, golden
from vllm_omni.unified.layout import GRID, IMAGE_LAYOUT, MARKED, Piece, layout_of
from vllm_omni.unified.spans import Span, grid_positions, spans_of_placeholder


def test_a_marked_canvas_is_one_piece_and_one_behind_a_time_is_two() -> None:
    assert list(MARKED.canvas_pieces(6)) == [Piece(6, False)]
    assert list(GRID.canvas_pieces(6)) == [Piece(1, True), Piece(5, False)]
    assert (MARKED.num_markers, GRID.num_markers) == (2, 1)


def test_a_model_is_marked_unless_it_says_otherwise() -> None:
    config = PreTrainedConfig()
    assert layout_of(config) is MARKED
    setattr(config, IMAGE_LAYOUT, "grid")
    assert layout_of(config) is GRID


def test_the_time_of_an_image_is_outside_its_span() -> None:
    """Three marks, a time, two latents, a separator, two places of a view, a mark."""
    is_embed = torch.tensor([0, 0, 0, 1, 1, 1, 0, 1, 1, 0], dtype=torch.bool)
    assert spans_of_placeholder(PlaceholderRange(5, 10, is_embed), GRID) == [Span(9, 14)]


def test_a_grid_stands_in_the_middle_of_a_line() -> None:
    assert grid_positions(9, (3, 5))[:, [0, -1]].T.tolist() == [[15, 14], [17, 18]]
    assert grid_positions(40, (5, 2))[:, [0, -1]].T.tolist() == [[42, 44], [46, 45]]  # halves are cut


@pytest.mark.skipif(not FLOWS, reason=f"no outputs of the original at {GOLDEN}")
def test_positions_of_pictures_are_the_originals() -> None:
    for name in PICTURES:
        last = FLOWS[name]["phases"][-1]
        for start, end in last["gen_image_slices"][0]:
            expected = golden(name)[f"phase{len(FLOWS[name]['phases']) - 1}.rope_pos_yx"][0, start:end]
            grid = golden(name)["denoise.noise"].shape[2:]
            assert torch.equal(grid_positions(start, (grid[0], grid[1])).T, expected), name
