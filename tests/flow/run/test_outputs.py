"""The outputs of a call, on frames that arrive in any order."""

from vllm_omni.flow.graph.transfer import ENTRY
from vllm_omni.flow.run.frame import EndReason, Frame
from vllm_omni.flow.run.outputs import CallOutputs


class NoLink:
    def send(self, message: object) -> None:
        """Credits go nowhere."""


def make_frame(seq: int, payload: object, *, last: bool, reason: EndReason = EndReason.NONE) -> Frame:
    return Frame("call", "writer", ENTRY, 0, "text", 0, seq, last, payload, reason)


async def test_an_end_that_arrives_before_the_last_frame_is_delivered_behind_it():
    ended = []
    outputs = CallOutputs("call", {"text": None}, NoLink(), ended.append, lambda *_: None)
    outputs.receive_frame(make_frame(1, None, last=True, reason=EndReason.EMPTY))
    assert outputs.num_buffered == 1
    assert not ended
    outputs.receive_frame(make_frame(0, "word", last=False))
    frame, end = await outputs.read(), await outputs.read()
    assert (frame.payload, frame.seq, frame.last) == ("word", 0, False)
    assert (end.payload, end.seq, end.last, end.reason) == (None, 1, True, EndReason.EMPTY)
    assert ended == ["text"]
