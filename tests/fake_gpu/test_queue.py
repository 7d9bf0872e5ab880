"""What is queued is done in any order that lines and waits allow, and in no other."""

from __future__ import annotations

import threading

import pytest

from tests.fake_gpu.queue import Queue

pytestmark = pytest.mark.fast
SEEDS = range(40)


def orders(wait: bool) -> set[str]:
    """What two lines of two letters write, by seed; wait: B only after a."""
    found = set()
    for seed in SEEDS:
        queue, written = Queue(seed), []
        one, other = queue.line("one"), queue.line("other")
        first = queue.add(one, "a", lambda written=written: written.append("a"))
        queue.add(one, "b", lambda written=written: written.append("b"))
        queue.add(other, "A", lambda written=written: written.append("A"))
        if wait:
            queue.add(other, "a wait", after=[first])
        queue.add(other, "B", lambda written=written: written.append("B"))
        queue.finish()
        found.add("".join(written))
    return found


def test_lines_without_waits_are_done_in_any_order() -> None:
    assert orders(wait=False) == {"abAB", "aAbB", "aABb", "AabB", "AaBb", "ABab"}


def test_a_wait_leaves_out_the_orders_that_it_forbids() -> None:
    assert orders(wait=True) == {"abAB", "aAbB", "aABb", "AabB", "AaBb"}


def test_who_waits_for_one_work_does_not_wait_for_others() -> None:
    """Under some seed the other line has not begun."""
    late = set()
    for seed in SEEDS:
        queue, written = Queue(seed), []
        queue.add(queue.line("other"), "A", lambda written=written: written.append("A"))
        work = queue.add(queue.line("one"), "a", lambda written=written: written.append("a"))
        queue.wait([work])
        late.add("".join(written))
        queue.finish()
        assert sorted(written) == ["A", "a"]
    assert {"a", "Aa"} <= late


def test_work_that_waits_for_others_lets_the_rest_go_on() -> None:
    """In a group its works are begun in one order, on whatever line."""
    queue, written, may = Queue(1), [], threading.Event()
    one, other = queue.line("one"), queue.line("other")

    def first() -> None:
        assert may.wait(60)
        written.append("first")

    queue.add(one, "first", first, group="a group")
    second = queue.add(other, "second", lambda: written.append("second"), group="a group")
    queue.wait([queue.add(queue.line("third"), "meanwhile", may.set)])
    queue.wait([second])
    assert written == ["first", "second"]
    queue.finish()


def test_an_error_is_raised_where_the_host_waits() -> None:
    queue = Queue(0)
    work = queue.add(queue.line("one"), "a division", lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError) as caught:
        queue.wait([work])
    assert caught.value.__notes__ == ["in a division, one"]
