"""Hooks that a model may define, beyond vLLM's own interface, to take part in a stage graph.

``ARModelRunner`` looks the hooks up once, when the model is loaded; a model without them is served as vLLM serves it.
Each hook is called once per engine step for the whole batch, because a Python loop over rows would cost more than the
decode step of a small model.

From: vLLM-Omni (paper), section 3.3: a preprocess function called at every iteration and a predefined dictionary of
per-request data.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import nn
from vllm.multimodal.inputs import MultiModalFeatureSpec
from vllm.sampling_params import SamplingParams

from vllm_omni.messages.failure import Failure
from vllm_omni.model_executor.frame_publisher import FramePublisher
from vllm_omni.model_executor.row_publisher import RowPublisher


@dataclass
class RequestInfo:
    """The runner's state of one request, beside vLLM's own; dropped when the request ends."""

    request_id: str
    num_prompt_tokens: int
    args: dict[str, Any]  # the stage arguments, see STAGE_ARGS
    params: SamplingParams = field(default_factory=SamplingParams)
    prompt_token_ids: Sequence[int] = ()
    mm_features: Sequence[MultiModalFeatureSpec] = ()  # media of the prompt
    state: dict[str, Any] = field(default_factory=dict)  # the model's own: hooks read and write it
    error: Failure | None = None  # reported with its next output, upon which it is aborted
    publisher: RowPublisher | FramePublisher | None = None  # if other stages read its rows, or its frames


class StepRequest(NamedTuple):
    """The part of one engine step that belongs to one request."""

    info: RequestInfo
    start: int  # position of its first token of this step in the request's sequence
    num_tokens: int
    offset: int  # of its first token in the batch's flat token dimension


@runtime_checkable
class ConsumesPayload(Protocol):
    """A model that reads payloads of an earlier stage."""

    def load_request(self, info: RequestInfo, payloads: Sequence[dict[str, Any]]) -> None:
        """Put the previous stage's payloads into ``info.state``. Called once, before the first step.

        Returning normally promises that ``preprocess`` cannot fail for this request.

        Args:
            payloads: in order; their tensors are read-only, and valid during this call.
        """

    def extend_request(self, info: RequestInfo, rows: torch.Tensor | None, last: bool) -> None:
        """Add rows that follow those of the payloads, before the step that needs them.

        Args:
            rows: [n, size], host, owned by the callee; None or no rows if only the end is reported.
            last: no rows follow. Set once for each request, also without a stream.
        """

    def preprocess(self, step: Sequence[StepRequest], input_ids: torch.Tensor, inputs_embeds: torch.Tensor) -> None:
        """Combine the previous stage's rows with this step's embeddings, in place.

        Args:
            step: the requests of this step.
            input_ids: [num_tokens], device.
            inputs_embeds: [num_tokens, embedding_size], device; ``embed_input_ids(input_ids)`` on entry.
        """


@runtime_checkable
class PublishesRows(Protocol):
    """A model whose hidden states feed a later stage."""

    def finished_rows(self, input_ids: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
        """One row per processed token as the next stage wants it: a new tensor, [num_tokens, size], same device.

        Args:
            input_ids: [num_tokens], device.
            hidden_states: [num_tokens, hidden_size], what ``forward`` returned.
        """


@runtime_checkable
class PublishesLayers(Protocol):
    """A model of which a later stage reads rows of named layers, not only of the last.

    It implements vLLM's ``SupportsEagle3``, whose interface returns the residual stream between layers.

    Attributes:
        row_layers: after how many layers, in ascending order; 0 for the embeddings. Empty: nothing is published.
    """

    row_layers: tuple[int, ...]

    def finished_layer_rows(self, input_ids: torch.Tensor, layers: Sequence[torch.Tensor]) -> torch.Tensor:
        """One row per processed token as the next stage wants it: a new tensor, [num_tokens, size], same device.

        Args:
            input_ids: [num_tokens], device.
            layers: of each of ``row_layers``, [num_tokens, hidden_size], without a norm.
        """


@runtime_checkable
class HasOwnPositions(Protocol):
    """A model whose M-RoPE positions do not follow from the prompt alone, but from the previous stage."""

    def init_mrope_positions(self, info: RequestInfo) -> tuple[torch.Tensor, int]:
        """Positions of the prompt and, if they do not just count up, of tokens behind it; and the delta of the others.

        Returns:
            int64 [3, n], n >= num_prompt_tokens; the delta.
        """


@runtime_checkable
class PredictsFrames(Protocol):
    """A talker whose sampled token is the first code of a frame, and that predicts the others in the same step."""

    def predict_frames(
        self, infos: Sequence[RequestInfo], hidden_states: torch.Tensor, token_ids: Sequence[int]
    ) -> list[list[int] | None]:
        """Predict the rest of each frame, and keep it for the row of the next step.

        Args:
            infos: the requests that a token was sampled for.
            hidden_states: [B, hidden_size], device: the rows that the tokens were sampled from.
            token_ids: the sampled tokens.

        Returns:
            For each request its whole frame, published with the token instead of rows; None if the token begins none.
        """

    def compile_frames(self, max_rows: int) -> None:
        """Compile what predicts the frames of up to ``max_rows`` requests. It takes seconds."""


@runtime_checkable
class Denoises(Protocol):
    """A language model that denoises pictures as tokens of its sequences, between the markers of an image.

    Its ``forward`` takes ``latent_rows``, the step's rows that are latents, [n] int64 on the device, or None.

    Attributes:
        num_canvas_channels: of a token of a canvas.
        end_of_picture: the token that ends a request with its picture.
    """

    num_canvas_channels: int
    end_of_picture: int

    def embed_canvas(self, latents: torch.Tensor, grid: tuple[int, int], time: torch.Tensor) -> torch.Tensor:
        """A canvas with its markers, [N + num_markers, hidden_size], see ``unified/layout.py``.

        Args:
            latents: [N, num_canvas_channels], float32, device.
            grid: rows and columns of tokens, N in all.
            time: [], float32, device; from 1, noise, to 0.
        """

    def velocities(self, hidden_states: torch.Tensor, grid: tuple[int, int], time: torch.Tensor) -> torch.Tensor:
        """The velocities of latents, [N, num_canvas_channels] float32.

        Args:
            hidden_states: [N, hidden_size], what ``forward`` returned for the latents.
            grid, time: as for ``embed_canvas``.
        """


@runtime_checkable
class WritesPictures(Protocol):
    """A language model that writes pictures as tokens, whose ids stand behind those of texts in one vocabulary.

    Its ``compute_logits`` is that of texts.

    Attributes:
        first_picture_id: the first id of a picture's tokens.
    """

    first_picture_id: int

    def picture_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """The logits of the next token of pictures, [N, number of their ids].

        Args:
            hidden_states: [N, hidden_size], what ``forward`` returned for the tokens before.
        """


def check_all_loaded(model: nn.Module, loaded: set[str]) -> None:
    """Call it at the end of ``load_weights``: vLLM's own check skips linear layers, which would stay uninitialized.

    Raises:
        ValueError: the checkpoint lacks parameters of the model; up to three are named.
    """
    if missing := sorted({name for name, _ in model.named_parameters()} - loaded):
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise ValueError(f"the checkpoint has no {', '.join(missing[:3])}{more}")
