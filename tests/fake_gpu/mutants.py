"""Faults of synchronization as programmers leave them, one line of the package each."""

from __future__ import annotations
import __future__

import inspect
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from moe_plugin.comm import functional, handles
from moe_plugin.dispatch import bundles, deepep, nccl_ep
from moe_plugin.dispatch.deepep import HybridEP
from moe_plugin.dispatch.once import Forwarding
from moe_plugin.dispatch.token_exchange import TokenDispatcher
from moe_plugin.kernels.weight_grads import RowWeightGrads
from moe_plugin.memory.activations.swap import SwappedStorage
from moe_plugin.memory.copier import Copier, Ticket
from moe_plugin.memory.experts.cache import ExpertCache
from moe_plugin.memory.weights.blocks import StreamedBlock
from moe_plugin.memory.weights.slots import Slots
from moe_plugin.training.gradients.replicas import Bucket
from moe_plugin.utils import machine


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
_TORCH = '__import__("torch")'  # not every module has the name
_ELSEWHERE = f"with {_TORCH}.cuda.stream({_TORCH}.cuda.Stream()):\n{16 * ' '}"


def elsewhere(function: Callable[..., Any], line: str, program: str) -> Mutant:
    """A line of a function's body that runs on a stream of its own, that no one waits for."""
    return Mutant(function, line, _ELSEWHERE + line, program, ("race",))


# of programs of one rank
ALONE = [
    Mutant(Copier._on_stream, "stream.wait_event(after)", "pass", "copies", ("race",)),
    Mutant(Copier._on_stream, "event.record(stream)",
           "event.record(torch.cuda.default_stream())", "copies", ("race", "host")),
    Mutant(Copier._here, f"event.record({_HERE})", "event.record(self.side_stream())", "copies",
           ("race",)),
    Mutant(Copier.start, "x.record_stream(self.side_stream())", "pass", "copies", ("free",)),
    Mutant(Copier.start, "x.record_stream(self.side_stream())",
           "x.record_stream(torch.cuda.current_stream())", "copies", ("free",)),
    Mutant(Ticket.wait, "torch.cuda.current_stream(self.copier.device).wait_event(self.event)",
           "pass", "weights streamed", ("race",)),
    Mutant(Ticket.synchronize, "self.event.synchronize()", "pass", "copies", ("host",)),
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
_OF_TWO = [
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
    Mutant(TokenDispatcher._arriving, "arrival.wait()", "pass", "deepep", ("race",)),
    Mutant(deepep.ElasticDeepEP.send, "event.current_stream_wait", "lambda: None", "deepep_v2",
           ("race",)),
    Mutant(deepep._Buffered.send_back, "event.current_stream_wait", "lambda: None", "deepep_v2",
           ("race",)),
    Mutant(HybridEP.send, "num_of_experts_per_rank=", "non_blocking=True, num_of_experts_per_rank=",
           "hybridep", ("host",)),
    Mutant(nccl_ep._stream, "current_stream(x.device)", "default_stream(x.device)", "nccl_ep",
           ("race",)),
    elsewhere(bundles._Travel.forward,
              "code_Q, weight_Q = unpack(linear(comm, packed, pairs.send, pairs.recv), layout)",
              "once to ranks"),
    elsewhere(functional._Pair.forward, "return COLLECTIVES[forward][0](comm, x.contiguous())",
              "slots shared"),
    elsewhere(RowWeightGrads.one,
              "return self._given(name, expert_weight_grad_add(*operands, into_LIO))",
              "main_grad in buckets"),
    elsewhere(RowWeightGrads.one,
              "return self._given(name, expert_weight_grad(*operands))", "DDP"),
]
# of programs of several ranks, by their number
TOGETHER = {2: _OF_TWO,
            4: [elsewhere(Forwarding._exchange, "return all_to_all(", "once to nodes")]}


@contextmanager
def changed(function: Callable[..., Any], old: str, new: str) -> Iterator[None]:
    """Inside, `function` runs with `new` in place of `old`, which is in its source once."""
    plain: Any = inspect.unwrap(function)
    source = textwrap.dedent(inspect.getsource(plain))
    assert source.count(old) == 1, f"{old!r} is {source.count(old)} times in {plain.__qualname__}"
    lines = "\n" * (plain.__code__.co_firstlineno - 1)
    names: dict[str, Any] = {}
    code = compile(lines + source.replace(old, new), plain.__code__.co_filename, "exec",
                   __future__.annotations.compiler_flag)
    exec(code, dict(plain.__globals__), names)  # noqa: S102 - a test's own text
    before = plain.__code__
    plain.__code__ = inspect.unwrap(names[plain.__name__]).__code__
    try:
        yield
    finally:
        plain.__code__ = before
