from vllm_omni.flow.run.credit import UNLIMITED, ReceiveWindow, SendLimits, open_all

A, B = ("a.run", "x"), ("b.run", "x")


def make_window(size=4):
    limits = []
    return ReceiveWindow(limits.append, size), limits


def receive(window, number):
    window.num_received += number


def test_credit_comes_back_by_half_windows():
    window, limits = make_window(size=4)
    receive(window, 4)
    for _ in range(4):
        window.on_read()
    assert limits == [6, 8]


def test_window_that_is_full_opens_for_a_reader_that_waits_elsewhere():
    window, limits = make_window(size=4)
    receive(window, 4)
    window.open_if_full()
    assert limits == [8]


def test_window_that_is_not_full_stays_as_it_is():
    window, limits = make_window(size=4)
    receive(window, 3)
    open_all([window])
    assert limits == []


def test_limits_never_shrink():
    window, limits = make_window(size=4)
    receive(window, 4)
    window.open_if_full()
    for _ in range(4):
        window.on_read()
    assert limits == [8]
    window.on_read()
    window.on_read()
    assert limits == [8, 10]


def test_field_is_full_when_one_of_its_readers_has_no_room():
    limits = SendLimits({"out": (A, B)}, size=2)
    limits.on_sent("out")
    assert not limits.full
    limits.on_sent("out")
    assert limits.full == {"out"}
    limits.on_credit(A, 4)
    assert limits.full == {"out"}
    limits.on_credit(B, 3)
    assert not limits.full


def test_each_field_has_its_own_window():
    limits = SendLimits({"out": (A,), "image": (B,)}, {"image": 1}, size=2)
    limits.on_sent("image")
    limits.on_sent("out")
    assert limits.full == {"image"}
    limits.on_credit(B, 2)
    assert not limits.full
    limits.on_sent("out")
    assert limits.full == {"out"}


def test_credit_that_comes_late_or_twice_changes_nothing():
    limits = SendLimits({"out": (A,)}, size=2)
    limits.on_credit(A, 5)
    limits.on_credit(A, 3)
    limits.on_credit(A, 5)
    for _ in range(4):
        limits.on_sent("out")
    assert not limits.full
    limits.on_sent("out")
    assert limits.full == {"out"}


def test_reader_that_has_stopped_never_holds_back():
    limits = SendLimits({"out": (A,)}, size=1)
    limits.on_sent("out")
    limits.on_credit(A, UNLIMITED)
    for _ in range(1000):
        limits.on_sent("out")
    assert not limits.full
