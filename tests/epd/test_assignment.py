"""Which instances may take a request's next tasks, and how much work these are."""

from types import SimpleNamespace

import pytest

from vllm_omni.config.epd import Tasks
from vllm_omni.epd.assignment import NUM_TOKENS_UNKNOWN, Candidate, RequestSize, find_candidates
from vllm_omni.epd.cost import CostModel


def walk(mix: str, todo: Tasks = Tasks.EPD, *, keeps_together: bool = False) -> str:
    """Instances and tasks of a request that always takes the first candidate."""
    kinds, taken = make_kinds(mix), []
    while todo:
        candidate = find_candidates(todo, kinds, keeps_together=keeps_together)[0]
        taken.append(f"{candidate.instance}:{candidate.tasks}")
        todo &= ~candidate.tasks
    return " ".join(taken)


def make_kinds(mix: str) -> dict[str, Tasks]:
    return {f"{kind}{number}": Tasks[kind] for number, kind in enumerate(mix.split())}


def test_each_mix_has_its_tasks() -> None:
    for mix, image, text in [
        ("E P D", "E0:E P1:P D2:D", "P1:P D2:D"),
        ("EP D", "EP0:EP D1:D", "EP0:P D1:D"),
        ("ED P", "ED0:E P1:P ED0:D", "P1:P ED0:D"),
        ("E PD", "E0:E PD1:PD", "PD1:PD"),
        ("EPD EPD", "EPD0:EPD", "EPD0:PD"),
    ]:
        assert (walk(mix), walk(mix, Tasks.PD)) == (image, text), mix


def test_a_reply_with_a_picture_has_an_instance_of_its_own() -> None:
    for mix, image, text in [
        ("EPD G", "EPD0:EP G1:G", "EPD0:EPD"),
        ("E P D G", "E0:E P1:P G3:G", "E0:E P1:P D2:D"),
        ("EPD", "EPD0:EP EPD0:G", "EPD0:EPD"),  # the instance for pictures does not run
        ("G", "G0:EPG", "G0:EPD"),
    ]:
        assert (walk(mix, Tasks.EP | Tasks.G), walk(mix)) == (image, text), mix
    assert walk("EPD G", Tasks.P | Tasks.G, keeps_together=True) == "G1:PG"


def test_instances_that_run_take_the_tasks_of_those_that_do_not() -> None:
    for mix, image in [
        ("P D", "P0:EP D1:D"),
        ("E D", "E0:E D1:PD"),
        ("E P", "E0:E P1:P P1:D"),
        ("D", "D0:EPD"),
        ("P", "P0:EP P0:D"),
    ]:
        assert walk(mix) == image, mix


def test_prefill_and_decode_may_have_to_stay_together() -> None:
    for mix, image in [
        ("E P D", "E0:E D2:PD"),
        ("EP D", "D1:EPD"),
        ("ED P", "ED0:E ED0:PD"),
        ("E PD", "E0:E PD1:PD"),
    ]:
        assert walk(mix, keeps_together=True) == image, mix


def test_an_encoder_alone_can_serve_nothing() -> None:
    assert find_candidates(Tasks.PD, make_kinds("E")) == []


def test_all_instances_made_for_the_next_task_are_candidates() -> None:
    found = find_candidates(Tasks.EPD, make_kinds("E PD EPD"))
    assert found == [Candidate("E0", Tasks.E), Candidate("EPD2", Tasks.EPD)]


def test_size_of_a_request() -> None:
    place = SimpleNamespace(get_num_embeds=lambda: 7)
    prompt = {"prompt_token_ids": [1, 2, 3], "mm_placeholders": {"image": [place, place]}}
    assert RequestSize.of(prompt, max_tokens=5, num_replies=2) == (14, 3, 10)
    assert RequestSize.of({}, max_tokens=None) == (0, 0, NUM_TOKENS_UNKNOWN)


def test_work_is_tokens_and_embeddings_or_seconds() -> None:
    size = RequestSize(num_embeds=100, num_prompt_tokens=120, num_reply_tokens=10)
    assert [size.work(tasks, None) for tasks in (Tasks.E, Tasks.P, Tasks.D, Tasks.EPD)] == [100, 120, 10, 230]
    cost = CostModel(1.0, 0.1, 0.0, 0.01, 0.0, 2.0, 0.02)
    assert size.work(Tasks.E, cost) == pytest.approx(4.0)
    assert size.work(Tasks.P, cost) == pytest.approx(2.2)
    assert size.work(Tasks.D, cost) == pytest.approx(1.0)
