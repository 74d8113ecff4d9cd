import dataclasses

import pytest
import torch
from diffusers.models.modeling_outputs import Transformer2DModelOutput
from torch import nn

from vllm_omni.diffusion.merge_rules import MergeRule, Unmergeable
from vllm_omni.diffusion.merging import Fingerprints, group_key, merge, split
from vllm_omni.diffusion.suspended_call import PendingCall

RULE = MergeRule(
    rows=("x", "t", "extra"),
    lists=("items",),
    same_lists=("shapes",),
    padded={"text": "mask"},
    shared=("ids",),
)
MODULE = nn.Identity()


def make_call(rows: int = 1, *, length: int = 3, fill: float = 0.0, **kwargs) -> PendingCall:
    own = {"x": torch.full((rows, 2), fill), "text": torch.full((rows, length, 4), fill)}
    return PendingCall("net", MODULE, "forward", own | kwargs, (), "cond", True)


def key(call: PendingCall, rule: MergeRule = RULE):
    return group_key(call, rule, Fingerprints())


def test_rows_are_concatenated():
    calls = [make_call(1, fill=1.0), make_call(2, fill=2.0)]
    merged, counts = merge(calls, RULE)
    assert counts == [1, 2]
    assert merged["x"].tolist() == [[1, 1], [2, 2], [2, 2]]


def test_a_dimension_of_one_and_a_scalar_are_expanded_to_all_rows_of_their_call():
    calls = [make_call(2, t=torch.tensor([5.0])), make_call(1, t=torch.tensor([7.0]))]
    assert key(calls[0]) == key(calls[1])
    assert merge(calls, RULE)[0]["t"].tolist() == [5, 5, 7]
    calls = [make_call(2, t=torch.tensor(5.0)), make_call(1, t=torch.tensor(7.0))]
    assert merge(calls, RULE)[0]["t"].tolist() == [5, 5, 7]


def test_mappings_of_rows_are_merged_by_their_keys():
    calls = [make_call(1, extra={"a": torch.full((1, 2), value)}) for value in (1.0, 2.0)]
    assert key(calls[0]) == key(calls[1])
    assert merge(calls, RULE)[0]["extra"]["a"].tolist() == [[1, 1], [2, 2]]


def test_shorter_texts_are_padded_and_masks_are_made():
    calls = [make_call(1, length=2, fill=1.0), make_call(1, length=3, fill=2.0)]
    assert key(calls[0]) == key(calls[1])
    merged, _ = merge(calls, RULE)
    assert merged["text"][:, :, 0].tolist() == [[1, 1, 0], [2, 2, 2]]
    assert merged["mask"].tolist() == [[True, True, False], [True, True, True]]


def test_calls_with_and_without_a_mask_are_merged():
    calls = [make_call(1, length=3, mask=torch.tensor([[1, 1, 0]])), make_call(1, length=2)]
    assert key(calls[0]) == key(calls[1])
    assert merge(calls, RULE)[0]["mask"].tolist() == [[1, 1, 0], [1, 1, 0]]


def test_texts_of_equal_length_without_masks_get_no_mask():
    assert "mask" not in merge([make_call(), make_call()], RULE)[0]


def test_where_masks_cannot_be_made_only_equal_lengths_are_merged():
    rule = dataclasses.replace(RULE, makes_masks=False)
    short, long = make_call(length=2), make_call(length=3)
    assert key(short, rule) != key(long, rule)
    masked = [make_call(length=length, mask=torch.ones(1, length)) for length in (2, 3)]
    assert key(masked[0], rule) == key(masked[1], rule) != key(long, rule)


def test_without_padding_only_equal_lengths_are_merged():
    rule = RULE.without_padding()
    assert key(make_call(length=2), rule) != key(make_call(length=3), rule)
    assert key(make_call(length=2), rule) == key(make_call(length=2, fill=1.0), rule)


def test_lists_keep_their_elements_of_any_shape():
    calls = [make_call(1, items=[torch.zeros(3)]), make_call(2, items=[torch.ones(1), torch.ones(5)])]
    assert key(calls[0]) == key(calls[1])
    assert [len(item) for item in merge(calls, RULE)[0]["items"]] == [3, 1, 5]


def test_a_list_of_one_is_repeated_for_all_rows_and_must_be_equal_in_a_group():
    same = [make_call(2, shapes=[(1, 4, 4)]), make_call(1, shapes=[(1, 4, 4)])]
    assert key(same[0]) == key(same[1]) != key(make_call(1, shapes=[(1, 2, 8)]))
    assert merge(same, RULE)[0]["shapes"] == [(1, 4, 4)] * 3


def test_an_argument_that_is_unused_for_some_values_excludes_calls_with_others():
    rule = MergeRule(rows=("x", "text"), unused_if={"cache": lambda cache: cache == {}})
    assert key(make_call(cache={}), rule) == key(make_call(cache={}), rule)
    with pytest.raises(Unmergeable, match="cache is in use"):
        key(make_call(cache={"keys": 1}), rule)


def test_shared_tensors_must_be_equal():
    ids = torch.arange(4)
    assert key(make_call(ids=ids)) == key(make_call(ids=ids.clone())) != key(make_call(ids=ids + 1))
    pair = (torch.ones(2), torch.zeros(2))
    assert key(make_call(ids=pair)) == key(make_call(ids=tuple(pair))) != key(make_call(ids=pair[::-1]))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"x": torch.zeros(1, 2)}, {"x": torch.zeros(1, 3)}),
        ({"x": torch.zeros(1, 2)}, {"x": torch.zeros(1, 2, dtype=torch.float64)}),
        ({"t": torch.zeros(1)}, {"t": None}),
        ({"scale": 1.0}, {"scale": 2.0}),
        ({"options": {"a": 1}}, {"options": {"a": 2}}),
        ({"return_dict": True}, {"return_dict": False}),
    ],
)
def test_calls_that_differ_in_other_arguments_than_rows_are_not_merged(one, other):
    assert key(make_call(**one)) != key(make_call(**other))


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (make_call(pixels=torch.zeros(1)), "the rule does not name the tensor pixels"),
        (make_call(2, t=torch.zeros(3)), "t has 3 rows, not 2"),
        (make_call(2, items=torch.zeros(2)), "items is not a list"),
        (make_call(2, shapes=[(1, 2), (3, 4)]), "shapes differs from row to row"),
        (dataclasses.replace(make_call(), positional=(1,)), "arguments without a name"),
        (make_call(hook=bytearray()), "cannot compare a bytearray"),
    ],
)
def test_arguments_that_the_rule_does_not_allow_exclude_a_call(call, reason):
    with pytest.raises(Unmergeable, match=reason):
        key(call)


@pytest.mark.parametrize("wrap", [tuple, Transformer2DModelOutput])
def test_outputs_are_split_by_rows(wrap):
    output = torch.arange(3.0)[:, None]
    calls = [make_call(1), make_call(2)]
    output = (output,) if wrap is tuple else wrap(sample=output)
    first, second = split(output, calls, [1, 2], RULE)
    assert type(first) is type(output)
    assert (first[0].tolist(), second[0].tolist()) == ([[0]], [[1], [2]])


def test_lists_of_outputs_are_split():
    assert split((["a", "b", "c"],), [make_call(1), make_call(2)], [1, 2], RULE) == [(["a"],), (["b", "c"],)]


@pytest.mark.parametrize("output", [torch.zeros(4, 2), torch.tensor(1.0), ["a"], object()])
def test_an_output_without_rows_is_rejected(output):
    with pytest.raises(Unmergeable):
        split(output, [make_call(), make_call()], [1, 1], RULE)


def test_outputs_of_an_encoder_are_cut_to_their_text_and_copied():
    rule = MergeRule(padded={"text": "mask"}, is_encoder=True)
    calls = [make_call(1, length=2), make_call(1, length=3)]
    output = torch.arange(24.0).view(2, 3, 4)
    first, second = split((output, output[:, 0]), calls, [1, 1], rule)
    assert first[0].shape == (1, 2, 4) and second[0].shape == (1, 3, 4)
    assert first[1].shape == (1, 4)
    assert first[0].untyped_storage().nbytes() == first[0].nbytes


def test_a_shared_tensor_is_read_once_and_again_when_changed():
    fingerprints = Fingerprints()
    tensor = torch.zeros(4)
    before = fingerprints.of(tensor)
    assert fingerprints.of(tensor) is before
    tensor.add_(1)
    assert fingerprints.of(tensor) != before
    del tensor
    assert len(fingerprints) == 0
