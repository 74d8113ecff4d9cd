"""Which instance may go on with a request, and when a reply can be gone on with."""

import pytest
from vllm.sampling_params import SamplingParams, StructuredOutputsParams

from vllm_omni.epd.cost import CostModel
from vllm_omni.epd.tasks import Load, Offer, find_offers, may_resume
from vllm_omni.messages.slo import SLO_ARGS


def walk(kinds: dict[str, str], todo: str = "EPD", *, is_whole: bool = False) -> list[Offer]:
    """The whole way of a request of which the first offer is always taken."""
    taken = []
    while todo:
        offers = find_offers(todo, kinds, is_whole=is_whole)
        taken.append(offers[0])
        todo = todo[len(offers[0].does) :]
    return taken


def named(*kinds: str) -> dict[str, str]:
    return {f"{kind}{number}": kind for number, kind in enumerate(kinds)}


@pytest.mark.parametrize(
    ("kinds", "image", "text"),
    [
        (("E", "P", "D"), ["E0:E", "P1:P", "D2:D"], ["P1:P", "D2:D"]),
        (("EP", "D"), ["EP0:EP", "D1:D"], ["EP0:P", "D1:D"]),
        (("ED", "P"), ["ED0:E", "P1:P", "ED0:D"], ["P1:P", "ED0:D"]),
        (("E", "PD"), ["E0:E", "PD1:PD"], ["PD1:PD"]),
        (("EPD", "EPD"), ["EPD0:EPD"], ["EPD0:PD"]),
    ],
)
def test_each_mix_has_its_tasks(kinds: tuple[str, ...], image: list[str], text: list[str]) -> None:
    mix = named(*kinds)
    assert [":".join(offer) for offer in walk(mix)] == image
    assert [":".join(offer) for offer in walk(mix, "PD")] == text


@pytest.mark.parametrize(
    ("kinds", "image"),
    [
        (("P", "D"), ["P0:EP", "D1:D"]),  # the encoder is dead: whoever prefills encodes
        (("E", "D"), ["E0:E", "D1:PD"]),
        (("E", "P"), ["E0:E", "P1:P", "P1:D"]),
        (("D",), ["D0:EPD"]),
        (("P",), ["P0:EP", "P0:D"]),
    ],
)
def test_whoever_is_left_does_what_the_dead_did(kinds: tuple[str, ...], image: list[str]) -> None:
    assert [":".join(offer) for offer in walk(named(*kinds))] == image


@pytest.mark.parametrize(
    ("kinds", "image"),
    [
        (("E", "P", "D"), ["E0:E", "D2:PD"]),
        (("EP", "D"), ["D1:EPD"]),
        (("ED", "P"), ["ED0:E", "ED0:PD"]),
        (("E", "PD"), ["E0:E", "PD1:PD"]),
    ],
)
def test_what_must_stay_together_does(kinds: tuple[str, ...], image: list[str]) -> None:
    assert [":".join(offer) for offer in walk(named(*kinds), is_whole=True)] == image


def test_an_encoder_alone_can_serve_nothing() -> None:
    assert find_offers("PD", named("E")) == []


def test_all_that_can_are_offered() -> None:
    assert find_offers("EPD", named("E", "PD", "EPD")) == [("E0", "E"), ("EPD2", "EPD")]


def test_work_is_tokens_and_embeddings_or_seconds() -> None:
    load = Load(num_embeds=100, num_prompt_tokens=120, num_reply_tokens=10)
    assert [load.work(does, None) for does in ("E", "P", "D", "EPD")] == [100, 120, 10, 230]
    cost = CostModel(1.0, 0.1, 0.0, 0.01, 0.0, 2.0, 0.02)
    assert load.work("E", cost) == pytest.approx(4.0)
    assert load.work("P", cost) == pytest.approx(2.2)
    assert load.work("D", cost) == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("params", "may"),
    [
        (SamplingParams(temperature=0), True),
        (SamplingParams(temperature=0, extra_args={SLO_ARGS: {"ttft_ms": 1}}), True),
        (SamplingParams(temperature=1), True),  # nobody was promised these random numbers
        (SamplingParams(temperature=1, seed=1), False),
        (SamplingParams(temperature=0, seed=1), True),
        (SamplingParams(temperature=0, presence_penalty=1), False),
        (SamplingParams(temperature=0, stop=["x"]), False),
        (SamplingParams(temperature=0, structured_outputs=StructuredOutputsParams(choice=["a"])), False),
        (SamplingParams(temperature=1, n=2), False),
    ],
)
def test_a_reply_goes_on_where_the_next_token_follows_from_those_before_it(params: SamplingParams, may: bool) -> None:
    assert may_resume(params) is may
