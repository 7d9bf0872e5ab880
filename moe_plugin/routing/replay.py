"""Routing that repeats itself when activations are recomputed.

Activation checkpointing runs a layer twice: once forward, once more inside backward. If the second
pass routed a token elsewhere (noise, a tie broken by another rounding), shapes and gradients would
be wrong. So the chosen experts of the first pass are recorded and used again in the second. Two
ways, for two kinds of checkpointing:

* `torch.utils.checkpoint.checkpoint(fn, x, use_reentrant=False, context_fn=routing_replay)`: one
  recording for each checkpointed call, matched by order of the routers inside it. Or simply
  `checkpoint(fn, x)` of this module.
* reentrant checkpointing of hosts (fairseq, Megatron): the layer is built with
  `HostContext(replay=True)`, and each chooser has a `ReplayLog`. A pass in training without
  gradients is a first pass and records; a pass inside backward takes the oldest recording.

Under torch.compile nothing is recorded: the compiled backward reuses the values of the first pass.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar, Token
from typing import Any, TypeVar

import torch
from torch import nn

T = TypeVar("T")
MAX_RECORDS = 4096  # micro-batches in flight; more means that recordings are made and never used
_active: ContextVar["_Tape | None"] = ContextVar("moe_plugin_routing_tape", default=None)
active_tape = _active.get  # the tape that records or repeats here; None: none does


class _Tape:
    """Chosen experts of one checkpointed call, in call order.

    recomputes: for activation checkpointing, within one pass; else to be kept and used again.

    Attributes:
        ids: the recorded values.
        calls: for each of them the number of the module that recorded it, by first calls, and what
            it is. Whoever saves the one saves and sets the other, too.
    """

    def __init__(self, recomputes: bool = False) -> None:
        self.recomputes = recomputes
        self.ids: list[Any] = []
        self.calls: list[tuple[int, str]] = []
        self.position: int | None = None  # None while recording
        self._numbers: dict[ReplayLog, int] = {}  # in this pass

    def begin(self, position: int | None) -> None:
        """A pass that records (None), or repeats from this position."""
        if position is None:
            self.ids, self.calls = [], []
        elif len(self.calls) != len(self.ids):
            raise ValueError(
                f"a recording of {len(self.ids)} values has {len(self.calls)} entries in `calls`: "
                "must be equal; save and load both, tape.ids and tape.calls")
        self.position, self._numbers = position, {}

    def replayed(self, choose: Callable[[], T], log: ReplayLog, what: str,
                 shape: tuple[int, ...] | None) -> T:
        """Record `choose()`, or return the next recorded choice, which must be of this call."""
        call = (self._numbers.setdefault(log, len(self._numbers) + 1), what)
        if self.position is None:
            self.ids.append(choose())
            self.calls.append(call)
            return self.ids[-1]
        self._check(self.position, call, shape)
        choice = self.ids[self.position]
        self.position += 1
        return choice

    def check_all_used(self) -> None:
        """`ValueError` where a replay made fewer calls than were recorded."""
        if self.position is not None and self.position < len(self.ids):
            raise _differs(self.position, "nothing more",
                           _described(self.calls[self.position]))

    def _check(self, position: int, call: tuple[int, str], shape: tuple[int, ...] | None) -> None:
        if position >= len(self.ids):
            raise _differs(position, _described(call), "nothing more")
        recorded = tuple(self.calls[position])
        if recorded != call:
            raise _differs(position, _described(call), _described(recorded))
        found = None if shape is None else tuple(self.ids[position].shape)
        if found != shape:
            raise _differs(position, f"{_described(call)} of shape {shape}", f"one of {found}")


def _described(call: tuple[Any, ...]) -> str:
    return f"the {call[1]} of module {call[0]}"


def _differs(position: int, asked: str, recorded: str) -> ValueError:
    return ValueError(
        f"call {position + 1} of a replay does not fit its recording: it asks for {asked}, and the "
        f"recording has {recorded}; must be equal: record and replay the same calls of the same "
        "layers, with as many tokens, and in the same mode (train() or eval())")


class _Use:
    """A context in which routing is recorded on a tape (position None) or repeated from it. It may
    be entered several times, one after the other, as backward passes of one graph do.
    """

    def __init__(self, tape: _Tape, position: int | None) -> None:
        self.tape, self.position = tape, position
        self.tokens: list[Token[_Tape | None]] = []

    def __enter__(self) -> _Tape:
        self.tape.begin(self.position)
        self.tokens.append(_active.set(self.tape))
        return self.tape

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        _active.reset(self.tokens.pop())
        # torch may stop a recomputation early, where all that backward needs is there
        if error is None and not self.tape.recomputes:
            self.tape.check_all_used()


def routing_replay() -> tuple[AbstractContextManager[_Tape], AbstractContextManager[_Tape]]:
    """The pair (first pass, recomputation) for `context_fn` of `torch.utils.checkpoint`."""
    tape = _Tape(recomputes=True)
    return _Use(tape, None), _Use(tape, 0)


def record_routing() -> AbstractContextManager[_Tape]:
    """Record the routing of everything inside; the value is for `replay_routing`.

    Not around activation checkpointing, which has its own recording. What is recorded (`.ids`: the
    routers' choices in call order, and noise if weights depend on it; `.calls`: which call each of
    them belongs to) can be saved with `torch.save`.
    """
    return _Use(_Tape(), None)


def replay_routing(tape: _Tape) -> AbstractContextManager[_Tape]:
    """Route the same calls in the same order as recorded.

    Weights of the model and noise may differ; the weights of the choices are computed again, and
    routers count their loads as in any pass.

    Raises:
        ValueError: other calls than were recorded, more or fewer, other shapes. Some routers record
            more in training than in evaluation (gshard, `second_expert_policy: random`, noisy_topk,
            dense_to_sparse, loss `global_batch`): replay them in the mode of the recording.
    """
    return _Use(tape, 0)


def checkpoint(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """`torch.utils.checkpoint.checkpoint`, non-reentrant, with routing recorded and replayed.

    Leave its `preserve_rng_state` on where weights depend on noise (`router.noise`,
    `router.input_jitter`), which is drawn again.
    """
    from torch.utils.checkpoint import checkpoint as torch_checkpoint

    return torch_checkpoint(fn, *args, use_reentrant=False, context_fn=routing_replay, **kwargs)


class ReplayLog:
    """Choices of one chooser, recorded in first passes and repeated in recomputations.

    A chooser (a router, a router selector, a layout tuner) owns one log.

    Args:
        enabled: the host recomputes with reentrant checkpointing (`HostContext.replay`). A tape
            (`record_routing`, `checkpoint`) works without it.
    """

    def __init__(self, enabled: bool = False) -> None:
        self.enabled = enabled
        self.records: deque[Any] = deque()

    def replayed(self, choose: Callable[[], T], training: bool, *, what: str = "choice",
                 shape: tuple[int, ...] | None = None, values: bool = True) -> T:
        """`choose()` in a first or plain pass; the recorded choice in a recomputation.

        Args:
            choose: makes the value.
            training: of the layer; without it nothing is recorded here.
            what: the value is, in a word or two: a tape gives it back only to a call for the same.
            shape: of the value, checked when a tape gives it back; None: not checked.
            values: False for what belongs to one pass and its recomputation, and is not part of
                `record_routing`.
        Raises:
            RuntimeError: recordings and recomputations do not match.
            ValueError: a tape has another value here.
        """
        if torch.compiler.is_compiling():
            # the compiler recomputes inside one graph, from the values the first pass had
            return choose()
        tape = _active.get()
        if tape is not None:
            kept = values or tape.recomputes
            return tape.replayed(choose, self, what, shape) if kept else choose()
        if not self.enabled or not training:
            return choose()
        if inside_backward():
            return self._oldest()
        choice = choose()
        if not torch.is_grad_enabled():
            self._add(choice)
        return choice

    def reverse_recent_calls(self, counts: Sequence[int]) -> None:
        """The last calls will be recomputed in reverse order. counts: recordings of each call,
        first to last.
        """
        taken = [self.records.pop() for _ in range(sum(counts))][::-1]
        for start in reversed([sum(counts[:i]) for i in range(len(counts))]):
            self.records.extend(taken[start:])
            del taken[start:]

    def forget(self) -> None:
        """Drop all recordings."""
        self.records.clear()

    def _oldest(self) -> Any:
        if not self.records:
            raise RuntimeError(
                "a recomputation found no recorded routing: its first pass ran with gradients on; "
                "use moe_plugin.routing.replay.checkpoint, or build the layer with "
                "HostContext(replay=False)")
        return self.records.popleft()

    def _add(self, choice: Any) -> None:
        if len(self.records) >= MAX_RECORDS:
            raise RuntimeError(
                f"{MAX_RECORDS} routings were recorded for recomputations that never came; build "
                "the layer with HostContext(replay=False), or call eval() for passes without "
                "backward")
        self.records.append(choice)


class OwnsReplayLogs:
    """Base of everything that owns recordings, directly or through its parts."""

    def forget_recordings(self) -> None:
        """Drop recordings whose recomputation never came."""
        raise NotImplementedError


def forget(model: nn.Module) -> None:
    """Drop a model's recordings whose recomputation never came, as after an out-of-memory step.

    The next recomputation would otherwise use them. A host that recomputes (`HostContext.replay`)
    calls it when no backward pass is pending.
    """
    for module in model.modules():
        if isinstance(module, OwnsReplayLogs):
            module.forget_recordings()


def replaying() -> bool:
    """Whether this code runs in the second pass of a call that a tape recorded.

    It has gradients as the first one had; what counts passes must count one of them.
    """
    tape = _active.get()
    return tape is not None and tape.position is not None and inside_backward()


def inside_backward() -> bool:
    """Whether this code runs inside a backward pass, that is, in a recomputation."""
    # set by the autograd engine for the time of a backward pass; -1 outside (torch >= 2.0)
    return torch._C._current_graph_task_id() != -1
