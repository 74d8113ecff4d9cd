"""The logits and tokens of pictures in a batch with texts."""

import msgspec
import torch
from torch import Tensor

from vllm_omni.messages.token_step import TOKEN_PICTURE, TokenStep
from vllm_omni.model_executor.stage_model import RequestInfo
from vllm_omni.unified.tokens import TokenPlan
from vllm_omni.worker.token_pictures import PictureTokens

NUM_TEXT_IDS, NUM_CODES = 4, 3


class Doubles:
    """A picture's logits are twice the hidden state."""

    first_picture_id = NUM_TEXT_IDS

    def picture_logits(self, hidden_states: Tensor) -> Tensor:
        return 2 * hidden_states


def info_of(request_id: str, scale: float) -> RequestInfo:
    plan = TokenPlan(num_tokens=8, scale=scale, unconditional=(1,))
    return RequestInfo(request_id, 1, {TOKEN_PICTURE: msgspec.to_builtins(plan)})


ROWS = {"text": 0, "b": 1, "a": 2, "a#u": 3, "c": 4}
INFOS = {"a": info_of("a", 3.0), "b": info_of("b", 1.0), "c": info_of("c", 2.0)}


def make_tokens(step: TokenStep) -> PictureTokens:
    tokens = PictureTokens(Doubles())
    tokens.start_step(step, ROWS, INFOS)
    return tokens


def test_only_the_rows_of_pictures_are_replaced() -> None:
    hidden = torch.arange(5 * NUM_CODES, dtype=torch.float32).reshape(5, NUM_CODES)
    logits = torch.zeros(5, NUM_TEXT_IDS + NUM_CODES)
    tokens = make_tokens(TokenStep({"a": "a#u", "b": None}, ["c"]))
    tokens.write_logits(logits, hidden)
    assert tokens.alone == [4]
    assert not logits[[0, 3, 4]].any(), "texts, partners, and what is alone keep theirs"
    assert (logits[1:3, :NUM_TEXT_IDS] == float("-inf")).all()
    assert torch.equal(logits[1, NUM_TEXT_IDS:], 2 * hidden[1])
    assert torch.equal(logits[2, NUM_TEXT_IDS:], 2 * (hidden[3] + 3 * (hidden[2] - hidden[3])))


def test_a_partner_gets_the_token_of_its_request() -> None:
    sampled = torch.tensor([[1], [5], [6], [2], [3]])
    make_tokens(TokenStep({"a": "a#u", "b": None}, ["c"])).copy_to_partners(sampled)
    assert sampled[:, 0].tolist() == [1, 5, 6, 6, 3]


def test_a_step_without_pictures_changes_nothing() -> None:
    logits, sampled = torch.zeros(5, 7), torch.zeros(5, 1)
    tokens = make_tokens(TokenStep())
    tokens.write_logits(logits, torch.ones(5, 3))
    tokens.copy_to_partners(sampled)
    assert tokens.alone == [] and not logits.any() and not sampled.any()
