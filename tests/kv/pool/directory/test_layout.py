import subprocess
import sys

import pytest

from vllm_omni.kv.pool.directory.layout import Layout, layout_id, make_layout

FIELDS = {"model": "tiny", "dtype": "float32", "groups": [{"block_size": 128}]}


def test_the_id_is_that_of_every_process_and_version():
    assert layout_id(FIELDS, checkpoint="c0ffee") == "de1c3efc73cc259a"
    code = f"from vllm_omni.kv.pool.directory.layout import layout_id; print(layout_id({FIELDS}, checkpoint='c0ffee'))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == layout_id(FIELDS, checkpoint="c0ffee")


def test_the_order_of_fields_does_not_matter():
    assert layout_id(dict(reversed(FIELDS.items())), checkpoint="c") == layout_id(FIELDS, checkpoint="c")


def test_every_value_changes_the_id():
    ids = [
        layout_id(FIELDS, checkpoint="a"),
        layout_id(FIELDS, checkpoint="b"),
        layout_id(FIELDS, checkpoint="a", cache_salt="tenant"),
        layout_id({**FIELDS, "dtype": "bfloat16"}, checkpoint="a"),
        layout_id({**FIELDS, "cache_salt": "tenant"}, checkpoint="a"),
        *(make_layout(FIELDS, checkpoint="a", num_parts=parts).id for parts in (1, 2)),
        make_layout(FIELDS, checkpoint="a", key_bytes=32).id,
    ]
    assert len(set(ids)) == len(ids)


def test_a_field_without_json_is_rejected():
    with pytest.raises(TypeError):
        layout_id({"dtype": object()}, checkpoint="a")
    with pytest.raises(ValueError):
        layout_id({"scale": float("nan")}, checkpoint="a")


@pytest.mark.parametrize("layout", [Layout("a{b}"), Layout(""), Layout("a", 0), Layout("a", 33), Layout("a", 1, 0)])
def test_a_layout_outside_its_ranges_is_rejected(layout):
    with pytest.raises(ValueError, match="must be 1 to"):
        layout.check()


def test_the_full_mask_has_all_parts():
    assert [Layout("a", parts).full_mask for parts in (1, 2, 32)] == [1, 3, 0xFFFFFFFF]
