"""The counting device and the fake GPU note what a real GPU would be asked to do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from moe_plugin.memory.copier import Copier
from moe_plugin.utils.machine import pinned_buffer
from tests.fake_gpu.device import CountingDevice, inner, register
from tests.fake_gpu.events import EVENTS
from tests.fake_gpu.fake import install
from tests.fake_gpu.gpu import CUDA, Event, Stream
from tests.fake_gpu.harness import on_ranks
from tests.fake_gpu.seen import Block, HostThread, Launch, Observer, Signal

# The counting device notes what makes a GPU's host wait, and nothing else.


READ, PAGEABLE = ["read"], ["pageable"]


def cases(x: Any, device: torch.device) -> dict[str, tuple[Callable[[], object], list[str]]]:
    """By name, what to do with x, [3] ones on the device, and what it must note."""
    host, pinned = torch.ones(3), torch.ones(3).pin_memory()
    here, there = torch.tensor([2, 0], device=device), torch.tensor([2, 0])
    one, mask = torch.tensor(1.0), torch.tensor([True, False, True])
    leaf = x.detach().requires_grad_()
    leaf.register_hook(lambda grad: grad * float(grad.sum()))
    with EVENTS.paused():
        indexed = x.detach().requires_grad_()[there]
    return {
        "item": (lambda: x.sum().item(), READ),
        "list": (lambda: x.tolist(), READ),
        "branch": (lambda: bool((x > 0).any()), READ),
        "to the host": (lambda: x.cpu(), READ),
        "indices": (lambda: x.nonzero(), READ),
        "mask": (lambda: x[x > 0], READ),
        "sizes": (lambda: torch.repeat_interleave(x.long()), READ),
        "in backward": (lambda: (leaf * 2).sum().backward(), READ),
        "numbers": (lambda: torch.tensor([1, 2], device=device), PAGEABLE),
        "numbers like it": (lambda: x.new_tensor([1.0]), PAGEABLE),
        "from the host": (lambda: host.to(device), PAGEABLE),
        "into it": (lambda: torch.empty_like(x).copy_(host), PAGEABLE),
        "pinned, and waited for": (lambda: pinned.to(device), PAGEABLE),
        "one number": (lambda: one.to(device), PAGEABLE),
        "index on the host": (lambda: x[there], PAGEABLE),
        "pinned index": (lambda: x[there.pin_memory()], PAGEABLE),
        "mask on the host": (lambda: x[mask], PAGEABLE),
        "index on the host, in backward": (lambda: indexed.sum().backward(), PAGEABLE),
        "write by an index on the host": (
            lambda: x.clone().index_put_((there,), x[:2]), PAGEABLE),
        "add by an index on the host": (
            lambda: x.index_put((there,), x[:2], accumulate=True), PAGEABLE),
        "write one number of the host": (lambda: x.clone().index_put_((here,), one), PAGEABLE),
        "write a Python number": (lambda: x.clone().__setitem__(here, 2.0), PAGEABLE),
        "index": (lambda: x[here], []),
        "write by an index": (lambda: x.clone().__setitem__(here, x[:2]), []),
        "place of the host": (lambda: x[torch.tensor(1)], []),
        "write to a range": (lambda: x.clone().__setitem__(slice(2), 2.0), []),
        "times a number of the host": (lambda: x * one + torch.where(x > 0, x, 0), []),
        "pinned": (lambda: pinned.to(device, non_blocking=True), []),
        "to pinned": (lambda: torch.empty(3, pin_memory=True).copy_(x, non_blocking=True), []),
        "known sizes": (lambda: torch.repeat_interleave(x.long(), output_size=3), []),
        "arithmetic": (lambda: (x * 2 + torch.arange(3, device=device)).sum(), []),
        "choice": (lambda: torch.where(x > 0, x, 0).masked_fill_(x > 0, 1), []),
    }


def notes() -> dict[str, tuple[list[str], list[str]]]:
    """What each case notes, and what it must."""
    device, found = register(), {}
    with CountingDevice():
        for name, (call, wanted) in cases(torch.ones(3, device=device), device).items():
            with EVENTS.noted() as seen:
                call()
            found[name] = [event.kind for event in seen], wanted
    return found


def mixed() -> list[str]:
    """What is said of operands that torch refuses, too."""
    with CountingDevice():
        x, host, index = torch.ones(3, device=register()), torch.ones(3), torch.tensor([2, 0])
        here = torch.tensor([2, 0], device=register())
        return [_error_of(call) for call in (
            lambda: x + host, lambda: x.index_select(0, index), lambda: x.gather(0, index),
            lambda: host[here], lambda: x.index_put_((here,), host[:2]),
            lambda: x.index_add_(0, index, x[:2]), lambda: x.index_copy_(0, here, host[:2]))]


def _error_of(call: Callable[[], object]) -> str:
    try:
        call()
    except RuntimeError as error:
        return str(error)
    return "no error"


def computed() -> list[float]:
    with CountingDevice():
        x = torch.tensor([1.0, 2.0], device=register(), requires_grad=True)
        (x.square() * 3).sum().backward()
        return inner(x.grad).tolist()


def everything() -> tuple[Any, ...]:
    return notes(), mixed(), computed()


def test_device() -> None:
    [(noted, errors, gradient)] = on_ranks(1, everything)
    assert not {name: kinds for name, (kinds, wanted) in noted.items() if kinds != wanted}
    assert not [error for error in errors if "counting and on cpu" not in error]
    assert gradient == [6.0, 12.0]


# The fake GPU says what a real one is asked to do, in the order of the host, and whose memory is
# freed when.


MAIN, SIDE = "the main stream", "stream 1"


class Log(Observer):
    """Lines of what is seen."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def launched(self, launch: Launch) -> None:
        sizes = [len(each) for each in (launch.reads, launch.writes, launch.made)]
        self.lines.append(f"{launch.name} on {launch.stream or launch.host.name}: {sizes}")

    def allocated(self, block: Block) -> None:
        self.lines.append(f"{block.nbytes} {block.kind} of {block.stream or 'the host'}")

    def freed(self, block: Block, host: HostThread) -> None:
        self.lines.append(f"{block.nbytes} {block.kind} freed")

    def recorded(self, event: Event, host: HostThread) -> None:
        self.lines.append(f"event on {event.stream}")

    def stream_waits(self, stream: Stream, event: Event, host: HostThread) -> None:
        self.lines.append(f"{stream} waits for {event.stream}")

    def host_waits(self, event: Event, host: HostThread) -> None:
        self.lines.append(f"{host.name} waits for {event.stream}")

    def used_by(self, block: Block, stream: Stream) -> None:
        self.lines.append(f"{block.nbytes} used by {stream}")

    def signalled(self, signal: Signal, host: HostThread) -> None:
        self.lines.append(f"signal of {host.name}")

    def heard(self, signal: Signal, host: HostThread) -> None:
        self.lines.append(f"{host.name} hears")


def programs() -> dict[str, list[str]]:
    """What each of some programs leads to."""
    log = Log()
    gpu = install(None, log)
    found = {}

    def noted(name: str, program: Callable[[], Any]) -> Any:
        log.lines = found[name] = []
        result, log.lines = program(), []
        return result

    with CountingDevice():
        x, host = noted("made", lambda: (torch.ones(4, device="cuda"),
                                         torch.empty(2, pin_memory=True)))
        noted("computed", lambda: torch.empty_like(x[:2]).copy_(x[2:]).sum().item())
        side = Stream()
        noted("waited", lambda: side.wait_stream(gpu.current))
        with gpu.using(side):
            made = [noted("on a side stream", lambda: x.add_(1) + 1)]
        noted("kept", lambda: made[0].record_stream(gpu.current))
        made.clear()
        noted("copied to the host", lambda: host.copy_(x[:2], non_blocking=True))
        noted("and waited for", lambda: (Event().query(), torch.cuda.synchronize(),
                                         host[1:].mul_(2)))
        p = nn.Parameter(torch.ones(8, device=CUDA))
        noted("other memory for a parameter", lambda: setattr(p, "data", x))
        found["its gradient"] = [str(torch.autograd.grad((p * p).sum(), p)[0].cpu().tolist())]
        noted("registered", lambda: (pinned_buffer((3,), torch.float32, CUDA).fill_(1), None)[1])
        copier = Copier("cuda")
        noted("in a thread", lambda: copier.start_call(lambda: host.numpy(), 0).wait())
        copier.close()
    return found


WANTED = {
    "made": [f"16 device of {MAIN}", f"aten::ones on {MAIN}: [0, 0, 1]",
             "8 pinned of the host"],
    "computed": [f"8 device of {MAIN}", f"aten::copy_ on {MAIN}: [1, 1, 0]",
                 f"4 device of {MAIN}", f"aten::sum on {MAIN}: [1, 0, 1]", "8 device freed",
                 f"aten::_local_scalar_dense on {MAIN}: [1, 0, 0]", f"event on {MAIN}",
                 f"the host waits for {MAIN}"],
    "waited": ["4 device freed", f"event on {MAIN}", f"{SIDE} waits for {MAIN}"],
    "on a side stream": [f"aten::add_ on {SIDE}: [0, 1, 0]", f"16 device of {SIDE}",
                         f"aten::add on {SIDE}: [1, 0, 1]"],
    "kept": [f"16 used by {MAIN}"],
    "copied to the host": ["16 device freed", f"aten::copy_ on {MAIN}: [1, 1, 0]"],
    "and waited for": [f"event on {MAIN}", f"the host waits for {MAIN}", f"event on {SIDE}",
                       f"the host waits for {SIDE}", "aten::mul_ on the host: [0, 1, 0]"],
    "other memory for a parameter": [],
    "registered": ["12 registered of the host", "aten::fill_ on the host: [0, 1, 0]",
                   f"event on {MAIN}", f"the host waits for {MAIN}", f"event on {SIDE}",
                   f"the host waits for {SIDE}", "12 registered freed"],
    "its gradient": ["[4.0, 4.0, 4.0, 4.0]"],
}


@pytest.mark.fast
def test_what_is_seen() -> None:
    [found] = on_ranks(1, programs)
    assert {name: found[name] for name in WANTED} == WANTED
    # a look at a job that is done hears of it, too
    heard = [line for i, line in enumerate(found["in a thread"])
             if not i or line != found["in a thread"][i - 1]]
    assert heard == [f"event on {MAIN}", "signal of the host", "copier_0 hears",
                       f"stream 2 waits for {MAIN}", "memory on copier_0: [0, 1, 0]",
                       "event on stream 2", "signal of copier_0", "the host hears",
                       f"{MAIN} waits for stream 2"]
