"""The fake GPU says what a real one is asked to do, in the order of the host, and whose memory is
freed when.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from moe_plugin.memory.copier import Copier
from moe_plugin.utils.machine import pinned_buffer
from tests.fake_gpu.device import CountingDevice
from tests.fake_gpu.fake import install
from tests.fake_gpu.gpu import CUDA, Event, Stream
from tests.fake_gpu.harness import on_ranks
from tests.fake_gpu.seen import Block, HostThread, Launch, Observer, Signal

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
