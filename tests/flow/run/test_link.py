import msgspec
import pytest

from tests.flow.builders import make_frame
from vllm_omni.flow import EndReason, Frame, InProcessLink


def test_in_process_link_delivers_before_send_returns():
    link, received = InProcessLink(), []
    link.bind("b.run", received.append)
    frame = make_frame(0)
    link.send(frame)
    assert received == [frame]


def test_frame_for_a_target_that_is_not_bound_is_an_error():
    with pytest.raises(KeyError, match=r"b\.run"):
        InProcessLink().send(make_frame(0))


@pytest.mark.parametrize("reason", EndReason)
def test_frame_survives_the_wire(reason):
    frame = Frame("call", "a.run", "b.run", 0, "x", 2**56 - 1, 3, True, {"text": "hello"}, reason)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(frame), type=Frame) == frame
