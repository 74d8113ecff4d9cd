"""``CanvasRunner``: the pictures of a runner's requests. It fills their rows of a step, and advances their latents.

Latents stay here until the request ends, also when it is preempted: then its context alone is computed again.

From: Omni-Flow, section 5.3.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec
import torch
from torch import Tensor

from vllm_omni.messages.canvas_step import OWN, PICTURE, CanvasStep, Tail
from vllm_omni.model_executor.stage_model import Denoises, RequestInfo
from vllm_omni.unified.flow import advance, combine, start_noise, timesteps
from vllm_omni.unified.layout import MARKED, Layout
from vllm_omni.unified.plan import WITHOUT_IMAGES, WITHOUT_TEXT, ImagePlan
from vllm_omni.unified.spans import Piece, Span, grid_positions, latents_of, pieces_of, position_of, positions_of


@dataclass
class Picture:
    plan: ImagePlan
    latents: Tensor  # [N, channels], float32, device
    times: Tensor  # [num_steps + 1], float32, host
    velocities: dict[str, Tensor] = field(default_factory=dict)  # of the current step, by branch


class Part(NamedTuple):
    """The tokens of one request in a step."""

    request_id: str
    row: int  # of its first token in the step
    start: int  # position of that token in the sequence
    num_tokens: int
    spans: Sequence[Span]  # the images of its prompt
    step: CanvasStep | None  # None: it asks for no picture
    layout: Layout = MARKED

    @property
    def has_canvas(self) -> bool:
        return self.step is not None and bool(self.step.together_with)

    @property
    def num_context(self) -> int:
        """Its tokens in front of the canvas."""
        return self.step.num_context - self.start if self.step is not None and self.has_canvas else self.num_tokens

    @property
    def canvas(self) -> slice:
        """The rows of its canvas; empty without one."""
        return slice(self.row + self.num_context, self.row + self.num_tokens)

    def pieces(self) -> list[Piece]:
        """How its tokens attend."""
        pieces = list(pieces_of(self.start, self.num_context, self.spans))
        if not self.has_canvas:
            return pieces
        return [*pieces, *self.layout.canvas_pieces(self.num_tokens - self.num_context)]

    def positions(self) -> Tensor:
        """For the rope, [num_tokens] int64: the tokens of a canvas share the one behind the context."""
        context = positions_of(self.start, self.num_context, self.spans)
        own = torch.tensor([position_of(self.start + self.num_context, self.spans)])
        return torch.cat([context, own.expand(self.num_tokens - self.num_context)])

    def latent_rows(self) -> list[int]:
        """Rows of the step that are latents."""
        rows = [
            self.row + index
            for first, end in latents_of(self.start, self.num_context, self.spans)
            for index in range(first, end)
        ]
        return rows + list(range(self.canvas.start + 1, self.canvas.stop - self.layout.num_behind))


class Report(NamedTuple):
    """The end of a denoise step that is reported: the last, or one of a picture that asks for it."""

    latents: Tensor | None  # [N, channels]: the last ones; for a preview, where the flow would end now; None: neither
    num_done: int
    is_last: bool


class CanvasRunner:
    """Pictures by request.

    Attributes:
        parts: of the current step, in the order of the batch.
    """

    def __init__(self, model: Denoises, device: torch.device, layout: Layout = MARKED) -> None:
        self._model = model
        self.layout = layout
        self._device = device
        self._pictures: dict[str, Picture] = {}
        self.parts: list[Part] = []

    def add(self, info: RequestInfo) -> None:
        """Note the picture that a request asks for."""
        if PICTURE not in info.args or info.request_id in self._pictures:
            return
        plan = msgspec.convert(info.args[PICTURE], ImagePlan)
        times = timesteps(plan.num_steps, plan.shift)
        self._pictures[info.request_id] = Picture(plan, self._noise(plan), times)

    def _noise(self, plan: ImagePlan) -> Tensor:
        """The latents before the first step, [N, channels]."""
        num_channels = self._model.num_canvas_channels
        if self.layout.noise_by_channel:
            return start_noise(num_channels, plan.num_latents, plan.seed).T.to(self._device)
        return start_noise(plan.num_latents, num_channels, plan.seed).to(self._device)

    def note_tail(self, request_id: str, tail: Tail) -> None:
        """Take the size that the end of a sequence has chosen for its picture."""
        if tail.grid is not None:
            picture = self._pictures[request_id]
            picture.plan = msgspec.structs.replace(picture.plan, grid=tail.grid)
            picture.latents = self._noise(picture.plan)

    def remove(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            self._pictures.pop(request_id, None)

    def ends_of_texts(self, steps: Mapping[str, CanvasStep]) -> Iterator[tuple[str, int]]:
        """The requests of a step that continue a text with their picture, and the token that ends the text.

        Where it was cut off, the runner has sampled another one, which the scheduler has replaced.
        """
        for request_id, step in steps.items():
            if step.branch == OWN and (token := self._pictures[request_id].plan.end_of_text) is not None:
                yield request_id, token

    @property
    def needs_pieces(self) -> bool:
        """Whether some tokens of the step see others that stand behind them."""
        return any(not piece.is_causal for part in self.parts for piece in part.pieces())

    def fill(self, inputs_embeds: Tensor, positions: Tensor) -> tuple[Tensor, dict[str, Any]]:
        """Put the canvases of a step into its embeddings, in place.

        Args:
            inputs_embeds: [num_tokens, hidden_size].
            positions: [num_tokens or more], of the sequences' slots.

        Returns:
            new positions, those of the rope; further arguments of the model.
        """
        if not any(part.spans or part.has_canvas for part in self.parts):
            return positions, {}
        positions, rows = positions.clone(), []
        for part in self.parts:
            if self.layout.shares_position:
                positions[part.row : part.row + part.num_tokens] = part.positions().to(positions.device)
            rows += part.latent_rows()
            if part.has_canvas and part.step is not None:
                picture = self._pictures[part.step.request_id]
                time = picture.times[part.step.step].to(self._device)
                canvas = self._model.embed_canvas(picture.latents, picture.plan.grid, time)
                inputs_embeds[part.canvas] = canvas.to(inputs_embeds)
                if not self.layout.shares_position:  # the other tokens have theirs from the model (``SupportsMRoPE``)
                    cells = grid_positions(part.step.num_context + 1, picture.plan.grid)
                    positions[1:, part.canvas.start + 1 : part.canvas.stop] = cells.to(positions.device)
        return positions, {"latent_rows": torch.tensor(rows, device=self._device)} if rows else {}

    def advance(self, hidden_states: Tensor) -> dict[str, Report]:
        """Advance the pictures all of whose branches have been computed.

        Args:
            hidden_states: of the step, [num_tokens, hidden_size].

        Returns:
            The ends of steps by request.
        """
        reports = {}
        for part in self.parts:
            if not part.has_canvas or part.step is None:
                continue
            request_id, branch, together_with, step, _ = part.step
            picture = self._pictures.get(request_id)
            if picture is None:  # it was aborted while the step was scheduled
                continue
            latents = hidden_states[part.canvas][1 : 1 + picture.plan.num_latents]
            time = picture.times[step].to(self._device)
            picture.velocities[branch] = self._model.velocities(latents, picture.plan.grid, time)
            if picture.velocities.keys() < set(together_with):
                continue
            velocity = self._guided(picture, together_with)
            now, after = (one.to(self._device) for one in picture.times[step : step + 2])
            picture.latents = advance(picture.latents, velocity, now, after)
            picture.velocities.clear()
            num_done = step + 1
            if num_done == picture.plan.num_steps:
                reports[request_id] = Report(picture.latents, num_done, True)
            elif picture.plan.is_reported(num_done):
                preview = picture.latents - after * velocity if picture.plan.has_preview(num_done) else None
                reports[request_id] = Report(preview, num_done, False)
        return reports

    def _guided(self, picture: Picture, together_with: Sequence[str]) -> Tensor:
        velocity, guidance = picture.velocities[OWN], picture.plan.guidance
        if WITHOUT_TEXT not in together_with:
            return velocity
        without_images = None
        if guidance.image_scale > 1:
            # Where there are no images, that context is the picture's own.
            without_images = picture.velocities.get(WITHOUT_IMAGES, velocity)
        return combine(velocity, picture.velocities[WITHOUT_TEXT], without_images, guidance)

    @property
    def end_of_picture(self) -> int:
        """The token that ends a request with its picture."""
        return self._model.end_of_picture

    def plan_of(self, request_id: str) -> ImagePlan:
        return self._pictures[request_id].plan


def parts_of(
    request_ids: Sequence[str],
    num_tokens: Mapping[str, int],
    starts: Sequence[int],
    spans: Mapping[str, Sequence[Span]],
    steps: Mapping[str, CanvasStep],
    layout: Layout = MARKED,
) -> list[Part]:
    """The parts of a step, in the order of its batch."""
    parts, row = [], 0
    for request_id, start in zip(request_ids, starts, strict=True):
        step = steps.get(request_id)
        parts.append(Part(request_id, row, start, num_tokens[request_id], spans[request_id], step, layout))
        row += num_tokens[request_id]
    return parts
