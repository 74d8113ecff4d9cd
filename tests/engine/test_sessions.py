"""A session ends when it has been idle for its time to live."""

from tests.flow.builders import ManualClock
from vllm_omni.engine.sessions import Sessions


def test_a_session_ends_after_its_time_without_a_call() -> None:
    clock, ended = ManualClock(), list[str]()
    sessions = Sessions(10.0, ended.append, clock)
    sessions.enter("a")
    sessions.enter("a")
    sessions.leave("a")
    clock.advance(20)
    assert not ended  # a call is open
    sessions.leave("a")
    clock.advance(9)
    sessions.enter("a")
    clock.advance(20)
    sessions.leave("a")
    clock.advance(11)
    assert ended == ["a"]
    assert len(sessions) == 0


def test_sessions_end_by_themselves() -> None:
    clock, ended = ManualClock(), list[str]()
    sessions = Sessions(10.0, ended.append, clock)
    for name in ("a", "b"):
        sessions.enter(name)
        sessions.leave(name)
        clock.advance(6)
    assert ended == ["a"]
    sessions.close()
    clock.advance(20)
    assert ended == ["a"]
    assert len(sessions) == 0
