"""What a rank sent in a call: counted from its begin, with parts that are left out."""

from __future__ import annotations

from moe_plugin.comm.state import Counters, TrafficMeter


def test_what_is_sent_while_it_holds_is_left_out() -> None:
    counters = Counters(100, 10, 7, 3, {"linear": 2})
    meter = TrafficMeter(counters)
    for messages, held in ((1, False), (2, True), (4, False), (8, True)):
        if held:
            meter.hold()
        counters.sent(messages, 16 * messages)
        counters.rows += messages
        counters.exchange("2dh" if held else "linear")
        if held:
            meter.go_on()
    assert meter.sent() == Counters(16 * 5, 5, 5, 0, {"linear": 2})
