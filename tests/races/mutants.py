"""Faults of synchronization as programmers leave them, one line of the package each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from moe_plugin import machine
from moe_plugin.comm import handles
from moe_plugin.dispatch.token_exchange import TokenDispatcher
from moe_plugin.gradients.replicas import Bucket
from moe_plugin.memory.activations.swap import SwappedStorage
from moe_plugin.memory.copier import Copier, Ticket
from moe_plugin.memory.experts.cache import ExpertCache
from moe_plugin.memory.weights.blocks import StreamedBlock
from moe_plugin.memory.weights.slots import Slots


@dataclass(frozen=True)
class Mutant:
    """`new` in place of `old` in a function. program: that shows it. kinds: of what is found."""

    function: Callable[..., Any]
    old: str
    new: str
    program: str
    kinds: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.function.__qualname__}: {self.new!r} for {self.old!r}"


_HERE = "torch.cuda.current_stream(self.device)"
# of programs of one rank
ALONE = [
    Mutant(Copier._on_stream, "stream.wait_event(after)", "pass", "copies", ("race",)),
    Mutant(Copier._on_stream, "event.record(stream)",
           "event.record(torch.cuda.default_stream())", "copies", ("race", "host")),
    Mutant(Copier._here, f"event.record({_HERE})", "event.record(self._side())", "copies",
           ("race",)),
    Mutant(Copier.start, "x.record_stream(self._side())", "pass", "copies", ("free",)),
    Mutant(Copier.start, "x.record_stream(self._side())",
           "x.record_stream(torch.cuda.current_stream())", "copies", ("free",)),
    Mutant(Ticket.wait, "torch.cuda.current_stream(self._copier.device).wait_event(self._event)",
           "pass", "weights streamed", ("race",)),
    Mutant(Ticket.synchronize, "self._event.synchronize()", "pass", "copies", ("host",)),
    Mutant(Slots._attach, "ticket.wait()", "pass", "weights streamed", ("race",)),
    Mutant(StreamedBlock.wait_kept, "ticket.synchronize()", "ticket.wait()", "weights streamed",
           ("host",)),
    Mutant(StreamedBlock.write, "self._coming.synchronize()", "pass", "weights streamed",
           ("host",)),
    Mutant(SwappedStorage.fetch, "self._allocate()", "pass", "activations swapped", ("free",)),
    Mutant(SwappedStorage.values, 'self._wait(self._in, "back from")', "pass",
           "activations swapped", ("race",)),
    Mutant(ExpertCache._wait, "ticket.wait()", "pass", "experts in host memory", ("race",)),
    Mutant(ExpertCache._wait, "ticket.wait()", "pass", "experts in a file", ("race",)),
    Mutant(handles._on_side_stream, "x.record_stream(side)", "pass", "an exchange given up",
           ("free",)),
    Mutant(handles._on_side_stream, "x.record_stream(side)",
           "x.record_stream(torch.cuda.current_stream(x.device))",
           "an exchange given up", ("free",)),
    Mutant(machine.pinned_buffer, "torch.cuda.synchronize(device)\n        runtime",
           "runtime", "pages of the host", ("free",)),
]
# of programs of two ranks
TOGETHER = [
    Mutant(handles._on_side_stream, "side.wait_stream(torch.cuda.current_stream(x.device))",
           "pass", "pieces", ("race",)),
    Mutant(handles._on_side_stream, "done = side.record_event()",
           "done = torch.cuda.current_stream(x.device).record_event()", "pieces", ("race",)),
    Mutant(handles._on_side_stream, "current.wait_event(done)", "pass", "pieces", ("race",)),
    Mutant(handles._on_side_stream, "current.wait_event(done)", "side.wait_event(done)", "pieces",
           ("race",)),
    Mutant(handles._on_side_stream, "out.record_stream(current)", "pass", "pieces", ("free",)),
    Mutant(handles._on_side_stream, "with torch.cuda.stream(side):",
           "with torch.cuda.stream(torch.cuda.Stream(x.device)):", "pieces", ("race",)),
    Mutant(machine.start_to_host, "arrived.synchronize()", "pass", "pre-gated", ("host",)),
    Mutant(machine.start_to_host, "arrived.record(module.current_stream(x.device))",
           "arrived.record(module.Stream(x.device))", "pre-gated", ("host",)),
    Mutant(TokenDispatcher.combine, "wait()", "pass", "deepep", ("race",)),
    Mutant(Bucket.start, "self._stale = False", "self._stale = bool(flat_N.zero_() is None)",
           "gradient hooks", ("race",)),
]
