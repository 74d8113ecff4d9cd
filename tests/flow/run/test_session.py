from vllm_omni.flow.run.session import GCScheduler


def test_head_starts_at_once_and_the_next_when_it_leaves():
    scheduler, started = GCScheduler(), []
    for call in "abc":
        scheduler.enter("s", call, lambda call=call: started.append(call))
    assert started == ["a"]
    assert scheduler.num_waiting == 2
    scheduler.leave("s", "a")
    assert started == ["a", "b"]
    scheduler.leave("s", "b")
    scheduler.leave("s", "c")
    assert started == ["a", "b", "c"]
    assert scheduler.num_waiting == 0


def test_call_that_leaves_the_queue_never_starts():
    scheduler, started = GCScheduler(), []
    for call in "abc":
        scheduler.enter("s", call, lambda call=call: started.append(call))
    scheduler.leave("s", "b")
    scheduler.leave("s", "a")
    assert started == ["a", "c"]


def test_sessions_are_independent():
    scheduler, started = GCScheduler(), []
    for session in "xy":
        scheduler.enter(session, session, lambda session=session: started.append(session))
    assert started == ["x", "y"]


def test_call_that_ends_while_it_starts_lets_the_next_one_in():
    scheduler, started = GCScheduler(), []
    scheduler.enter("s", "a", lambda: started.append("a"))
    scheduler.enter("s", "b", lambda: (started.append("b"), scheduler.leave("s", "b")))
    scheduler.enter("s", "c", lambda: started.append("c"))
    scheduler.leave("s", "a")
    assert started == ["a", "b", "c"]
