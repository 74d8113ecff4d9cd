import pytest

from vllm_omni.speech.text import cut

CONTROL_TOKENS = ["<|im_end|>", "<|im", "ab", "bab", "aa", "x"]


@pytest.mark.parametrize(
    "text",
    ["", "plain", "<|im_end|>", "<<|im_end|><|im_end|>", "babab", "aaaa", "a<|im_endab|>", "xax", "é<|im_end|>é"],
)
def test_no_part_of_a_cut_text_holds_a_control_token(text: str) -> None:
    parts = list(cut(text, CONTROL_TOKENS))
    assert "".join(parts) == text
    assert not [token for token in CONTROL_TOKENS for part in parts if len(token) > 1 and token in part]


def test_a_text_without_control_tokens_stays_whole() -> None:
    assert list(cut("Is 1 < 2 | 3 > 2?", CONTROL_TOKENS[:1])) == ["Is 1 < 2 | 3 > 2?"]
    assert list(cut("text", [])) == ["text"]
