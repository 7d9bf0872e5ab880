"""The smallest programs of two streams and a host, and which of them are in order."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from tests.fake_gpu.gpu import CUDA, Stream, cuda
from tests.fake_gpu.race_programs import found_by, prepare

Then = Callable[[Tensor, Stream, Stream], object]


def _wait_by_third(x: Tensor, one: Stream, other: Stream) -> Tensor:
    third = Stream()
    third.wait_stream(one)
    other.wait_stream(third)
    return _read(x, other)


def _read(x: Tensor, stream: Stream) -> Tensor:
    with cuda().using(stream):
        return x + 1


def _wait(x: Tensor, one: Stream, other: Stream) -> Tensor:
    other.wait_stream(one)
    return _read(x, other)


def _wait_late(x: Tensor, one: Stream, other: Stream) -> None:
    _read(x, other)
    other.wait_stream(one)


def _write_other_half(x: Tensor, one: Stream, other: Stream) -> None:
    with cuda().using(other):
        x[:4].fill_(0)


def _host_waits(x: Tensor, one: Stream, other: Stream) -> Tensor:
    one.synchronize()
    return _read(x, other)


def _item(x: Tensor, one: Stream, other: Stream) -> Tensor:
    with cuda().using(one):
        x[0].item()  # waits for all that this stream was given
    return _read(x, other)


def _event_of_before(x: Tensor, one: Stream, other: Stream) -> Tensor:
    event = one.record_event()
    with cuda().using(one):
        x[4:].fill_(3)
    other.wait_event(event)
    return _read(x, other)


def _event_never_recorded(x: Tensor, one: Stream, other: Stream) -> Tensor:
    other.wait_event(torch.cuda.Event())
    return _read(x, other)


def _pinned(x: Tensor, one: Stream, other: Stream) -> Tensor:
    host = torch.empty(8, pin_memory=True)
    with cuda().using(one):
        host.copy_(x, non_blocking=True)
    return host


def _read_pinned(x: Tensor, one: Stream, other: Stream) -> list[float]:
    return _pinned(x, one, other).tolist()


def _wait_and_read_pinned(x: Tensor, one: Stream, other: Stream) -> list[float]:
    host = _pinned(x, one, other)
    one.synchronize()
    return host.tolist()


def _drop_result(x: Tensor, one: Stream, other: Stream) -> None:
    other.wait_stream(one)
    made = _read(x, other)  # memory of `other`
    one.wait_stream(other)
    _read(made, one)


def _keep_result(x: Tensor, one: Stream, other: Stream) -> None:
    other.wait_stream(one)
    made = _read(x, other)
    one.wait_stream(other)
    made.record_stream(one)
    _read(made, one)


# by name: what is done with eight numbers that `one` has written on memory of the main stream, and
# what kinds must be found
ORDERS: dict[str, tuple[Then, set[str]]] = {
    "no wait": (lambda x, one, other: _read(x, other), {"race"}),
    "a wait": (_wait, set()),
    "a wait after": (_wait_late, {"race"}),
    "a wait by a third stream": (_wait_by_third, set()),
    "the host waits": (_host_waits, set()),
    "the host reads a number": (_item, set()),
    "the event is of before": (_event_of_before, {"race"}),
    "the event was not recorded": (_event_never_recorded, {"race"}),
    "another part of the buffer": (_write_other_half, set()),
    "pinned memory": (_read_pinned, {"host"}),
    "pinned memory, waited for": (_wait_and_read_pinned, set()),
    "memory of another stream": (_drop_result, {"free"}),
    "memory of another stream, recorded": (_keep_result, set()),
}


def kinds() -> dict[str, set[str]]:
    """Of each of them what is found."""
    detector, found = prepare(), {}
    for name, (then, _) in ORDERS.items():
        def program(then: Then = then) -> None:
            x, one, other = torch.empty(8, device=CUDA), Stream(), Stream()
            with cuda().using(one):
                x[4:].fill_(1)
            then(x, one, other)
            cuda().synchronize()

        found_by(detector, program)
        found[name] = {finding.kind for finding in detector.found}
    return found
