"""``PictureTokens``: the tokens of pictures, each sampled once for a request and its unconditional partner."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
import torch
from torch import Tensor

from vllm_omni.messages.token_step import TOKEN_PICTURE, TokenStep
from vllm_omni.model_executor.stage_model import RequestInfo, WritesPictures
from vllm_omni.unified.tokens import TokenPlan, guided


class PictureTokens:
    """The pictures of the current step.

    Attributes:
        alone: rows of the batch of which no token is sampled.
    """

    def __init__(self, model: WritesPictures) -> None:
        self._model = model
        self._rows: list[int] = []  # of the requests that get a token
        self._partners: list[int] = []  # of their partners; without one, the request's own
        self._scales: list[float] = []
        self.alone: list[int] = []

    def start_step(self, step: TokenStep, rows: Mapping[str, int], infos: Mapping[str, RequestInfo]) -> None:
        """Find the rows of a step.

        Args:
            rows: request -> its row in the batch.
        """
        plans = [msgspec.convert(infos[one].args[TOKEN_PICTURE], TokenPlan) for one in step.sampled]
        self._rows = [rows[one] for one in step.sampled]
        self._partners = [rows[partner or one] for one, partner in step.sampled.items()]
        self._scales = [plan.scale for plan in plans]
        self.alone = [rows[one] for one in step.alone]

    def write_logits(self, logits: Tensor, hidden_states: Tensor) -> None:
        """Replace the logits of pictures by those of their tokens, in place.

        Args:
            logits: [B, number of ids].
            hidden_states: [B, hidden_size], the rows that the logits were computed from.
        """
        if not self._rows:
            return
        own, unconditional = self._model.picture_logits(hidden_states[self._rows + self._partners]).chunk(2)
        scales = torch.tensor(self._scales, device=own.device, dtype=own.dtype)[:, None]
        values = logits.new_full((len(self._rows), logits.shape[1]), float("-inf"))
        first = self._model.first_picture_id
        values[:, first : first + own.shape[1]] = guided(own, unconditional, scales)
        logits[self._rows] = values

    def copy_to_partners(self, token_ids: Tensor) -> None:
        """Give each partner the token of its request.

        Args:
            token_ids: of the step, [B, 1]; changed in place.
        """
        if self._rows:
            token_ids[self._partners] = token_ids[self._rows]
