"""Routing that repeats itself when activations are recomputed.

Activation checkpointing runs a layer twice: once forward, once more inside backward. If the second
pass routed a token elsewhere (noise, a tie broken by another rounding), or read a count that other
passes have changed meanwhile, shapes and gradients would be wrong. So what the first pass chose is
recorded and used again in the second.

A recording belongs to one call of a checkpoint. It is stored on the object that torch keeps for
that call from the first pass to the recomputation: the `ctx` of a reentrant checkpoint's
`torch.autograd.Function` (torch's, fairseq's, Megatron's, DeepSpeed's), or the frame of torch's
non-reentrant checkpoint. Both passes find the object on Python's call stack (`enclosing`). So
recordings never get mixed up, in whatever order backward passes run, a forward pass under `no_grad`
records nothing, and recordings are freed together with the graph.

Random numbers: a recomputation that skips a draw leaves the generators as the first pass left them,
so that dropout after the router repeats as well.

Under torch.compile nothing is recorded: the compiled backward reuses the values of the first pass.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar, Token
from dataclasses import dataclass
from types import FrameType
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from moe_plugin.utils.machine import inside_backward

T = TypeVar("T")
Key = tuple[object, str]  # who chose, and what
_active: ContextVar["_Tape | None"] = ContextVar("moe_plugin_routing_tape", default=None)
# what replaces saved tensors now, or None; torch has it since 2.8
_top_hooks: Callable[[bool], Any] = getattr(
    torch._C._autograd, "_top_saved_tensors_default_hooks", lambda _: True)
_ATTRIBUTE = "moe_plugin_recording"  # of the object that stands for a checkpointed call
_first: ContextVar[bool] = ContextVar("moe_plugin_first_pass", default=False)


@dataclass(frozen=True)
class _Recorded:
    """A recorded choice. moves: generators that drew for it, with their states before and after."""

    value: Any
    moves: tuple[tuple[torch.Generator, Tensor, Tensor], ...] = ()

    @classmethod
    def of(cls, choose: Callable[[], Any]) -> _Recorded:
        before = [(g, g.get_state()) for g in _generators()]
        value = choose()
        moves = ((g, state, g.get_state()) for g, state in before)
        return cls(value, tuple(move for move in moves if not _equal(move[1], move[2])))

    def move_generators(self) -> None:
        """Move each generator past the draws, if it is where it was before them in the first pass.

        Otherwise the checkpoint does not preserve random numbers, and its generators must not be
        set back.
        """
        for generator, before, after in self.moves:
            if _equal(generator.get_state(), before):
                generator.set_state(after)


def _generators() -> list[torch.Generator]:
    """The default generators of this machine whose states can be read now."""
    found = [torch.default_generator]
    for device in (torch.cuda, torch.xpu):
        if device.is_initialized() and not (
                device is torch.cuda and torch.cuda.is_current_stream_capturing()):
            found += getattr(device, "default_generators", ())
    return found


def _equal(a: Tensor, b: Tensor) -> bool:
    # not by an operation of torch, which a mode would see that counts operations
    return bool((a.numpy() == b.numpy()).all())


class Recording:
    """What one checkpointed call chose in its first pass, by chooser and in call order."""

    def __init__(self) -> None:
        self._entries: dict[Key, list[_Recorded]] = {}
        self._read: dict[Key, int] = {}  # by the backward pass `_task`
        self._task = -1

    @classmethod
    def of(cls, owner: Any) -> Recording:
        """The recording of the object that stands for a checkpointed call."""
        found: Recording | None = getattr(owner, _ATTRIBUTE, None)
        if found is None:
            found = cls()
            setattr(owner, _ATTRIBUTE, found)
        return found

    def add(self, key: Key, entry: _Recorded) -> None:
        self._entries.setdefault(key, []).append(entry)

    def take(self, key: Key, shape: tuple[int, ...] | None) -> _Recorded:
        """The next choice of this key in this backward pass.

        Raises:
            RuntimeError: the first pass made fewer of these choices, or one of another shape.
        """
        task = torch._C._current_graph_task_id()
        if task != self._task:  # with `retain_graph` each backward pass recomputes
            self._task, self._read = task, {}
        entries, place = self._entries.get(key, []), self._read.get(key, 0)
        if place == len(entries) and task == -1:  # saved tensors are read outside of backward
            place = 0
        if place >= len(entries):
            raise RuntimeError(
                f"a recomputation asks {place + 1} times for {_name(key)}, which the first pass "
                f"recorded {len(entries)} times; {_SAME_CALLS}")
        self._read[key] = place + 1
        found = getattr(entries[place].value, "shape", None)
        if shape is not None and tuple(found or ()) != shape:
            raise RuntimeError(
                f"a recomputation asks for {_name(key)} of shape {shape}, and the first pass "
                f"recorded one of shape {tuple(found or ())}; {_SAME_CALLS}")
        return entries[place]


_SAME_CALLS = ("must be equal: a checkpointed function must call the same layers with the same "
               "tokens and in the same mode (train() or eval()) when it runs again")


def _name(key: Key) -> str:
    owner, what = key
    number = getattr(getattr(owner, "host", None), "layer_number", None)
    layer = "" if number is None else f" of MoE layer {number}"
    return f"the {what} of {type(owner).__name__}{layer}"


def _function_context(frame: FrameType) -> Any:
    """The `ctx` of a `torch.autograd.Function` that runs in this frame."""
    code = frame.f_code
    if not code.co_argcount or code.co_varnames[0] == "self":
        return None
    ctx = frame.f_locals.get(code.co_varnames[0])
    return ctx if isinstance(ctx, FunctionCtx) else None


def _new_frame(frame: FrameType) -> Any:
    """The frame object that a non-reentrant checkpoint has made for its first pass."""
    if "gen" in frame.f_code.co_varnames:  # torch's, which makes it in a generator
        frame = getattr(frame.f_locals.get("gen"), "gi_frame", None) or frame
    return _frame_object(frame, "new_frame")  # Transformer Engine makes it in the function itself


def _recomputed_frame(frame: FrameType) -> Any:
    """The frame object whose first pass a non-reentrant checkpoint repeats."""
    return _frame_object(frame, "frame")


def _frame_object(frame: FrameType, name: str) -> Any:
    code = frame.f_code
    found = frame.f_locals.get(name) if name in code.co_varnames + code.co_freevars else None
    return found if hasattr(found, "recompute_fn") else None


# by the name of a function in which a checkpointed call runs: what finds the object that stands for
# the call, and whether the function is the recomputation
_PLACES: dict[str, tuple[Callable[[FrameType], Any], bool]] = {
    "forward": (_function_context, False), "backward": (_function_context, True),
    "checkpoint": (_new_frame, False), "unpack_hook": (_recomputed_frame, True),
}


def enclosing() -> tuple[Any, list[Any]]:
    """The checkpointed calls that run here, each as the object that stands for it from its first
    pass to its recomputation.

    Returns: the innermost one that is recomputed, or None; and those inside of it that are in their
        first pass.
    """
    firsts: list[Any] = []
    frame = sys._getframe(1)
    while frame is not None:
        place = _PLACES.get(frame.f_code.co_name)
        if place is not None:
            find, recomputes = place
            owner = find(frame)
            if owner is not None and recomputes:
                return owner, firsts
            if owner is not None:
                firsts.append(owner)
        frame = frame.f_back
    return None, firsts


def runs_once(training: bool) -> bool:
    """Whether this pass of a layer is neither repeated nor recorded, as far as can be seen without
    a look at the call stack: it has gradients, and nothing replaces what autograd saves.
    """
    if _active.get() is not None:
        return False
    return not training or (torch.is_grad_enabled() and _top_hooks(True) is None
                            and torch._C._current_graph_task_id() == -1)


def replayed(owner: object, choose: Callable[[], T], training: bool, *, what: str = "choice",
             shape: tuple[int, ...] | None = None, values: bool = True) -> T:
    """`choose()` in a first or plain pass; the choice of the first pass in a recomputation.

    Args:
        owner: who chooses (a router, a layout tuner).
        choose: makes the value.
        training: of the layer; without it only a tape records and repeats.
        what: a name for the value in a word or two. A recording returns a value only to a call for
            the same owner and name.
        shape: of the value, checked when it is repeated; None: not checked.
        values: False for what belongs to one pass and its recomputation, and is not part of
            `record_routing`.
    Raises:
        RuntimeError: first pass and recomputation do not match.
        ValueError: a tape has another value here.
    """
    if torch.compiler.is_compiling():
        # the compiler recomputes inside one graph, from the values the first pass had
        return choose()
    if runs_once(training):
        return choose()
    tape = _active.get() if values else None
    source, firsts = enclosing()
    recorded: Recording | None = getattr(source, _ATTRIBUTE, None)
    if recorded is not None:
        entry = recorded.take((owner, what), shape)
        entry.move_generators()
    elif tape is not None:
        entry = tape.replayed(choose, owner, what, shape)
    elif not firsts:
        return choose()
    else:
        entry = _Recorded.of(choose)
    for first in firsts:
        Recording.of(first).add((owner, what), entry)
    value: T = entry.value
    return value


class _Tape:
    """Chosen experts of a pass, in call order, to be kept and used again.

    Attributes:
        ids: the recorded values.
        calls: for each of them the number of the module that recorded it, by first calls, and what
            it is. Whoever saves the one saves and sets the other, too.
    """

    def __init__(self) -> None:
        self.ids: list[Any] = []
        self.calls: list[tuple[int, str]] = []
        self.position: int | None = None  # None while recording
        self._numbers: dict[object, int] = {}  # in this pass
        self._moves: list[Any] = []  # of generators, as long as the tape is not loaded

    def begin(self, position: int | None) -> None:
        """A pass that records (None), or repeats from this position."""
        if position is None:
            self.ids, self.calls, self._moves = [], [], []
        elif len(self.calls) != len(self.ids):
            raise ValueError(
                f"a recording of {len(self.ids)} values has {len(self.calls)} entries in `calls`: "
                "must be equal; save and load both, tape.ids and tape.calls")
        self.position, self._numbers = position, {}

    def replayed(self, choose: Callable[[], Any], owner: object, what: str,
                 shape: tuple[int, ...] | None) -> _Recorded:
        """Record `choose()`, or return the next recorded choice, which must be of this call."""
        call = (self._numbers.setdefault(owner, len(self._numbers) + 1), what)
        if self.position is None:
            entry = _Recorded.of(choose)
            self.ids.append(entry.value)
            self.calls.append(call)
            self._moves.append(entry.moves)
            return entry
        self._check(self.position, call, shape)
        moves = self._moves[self.position] if len(self._moves) == len(self.ids) else ()
        entry = _Recorded(self.ids[self.position], moves)
        entry.move_generators()
        self.position += 1
        return entry

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
    be entered several times, one after the other.
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
        if error is None:
            self.tape.check_all_used()


def record_routing() -> AbstractContextManager[_Tape]:
    """Record the routing of everything inside; the value is for `replay_routing`.

    A recomputation of activations inside is not recorded again. What is recorded (`.ids`: the
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
    """`torch.utils.checkpoint.checkpoint`, non-reentrant. Routing is recorded and replayed, as with
    any other checkpoint.

    Leave its `preserve_rng_state` on where weights depend on noise (`router.noise`,
    `router.input_jitter`, `router.input_dropout`), which is drawn again.
    """
    from torch.utils.checkpoint import checkpoint as torch_checkpoint

    return torch_checkpoint(fn, *args, use_reentrant=False, **kwargs)


def routing_replay() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """A pair for `context_fn` of `torch.utils.checkpoint`, for scripts that pass it. It does
    nothing: routing is recorded and replayed without it.
    """
    return nullcontext(), nullcontext()


def replaying() -> bool:
    """Whether this code runs in the second pass of a call whose first pass had gradients, too.

    That is a non-reentrant checkpoint's. Code that counts passes with gradients must not count this
    one.
    """
    if torch.compiler.is_compiling() or not inside_backward():
        return False
    source, _ = enclosing()
    return source is not None and not isinstance(source, FunctionCtx)


def counts(training: bool) -> bool:
    """Whether a pass of a layer counts in what moves once per step, and in statistics.

    It does in training mode with gradients, once: a recomputation does not count again, and a pass
    without gradients counts only as the first one of a call that is recomputed with gradients.

    training: of the layer.
    """
    if not training or inside_backward():
        return False
    if torch.is_grad_enabled():
        return torch.compiler.is_compiling() or runs_once(training) or enclosing()[0] is None
    return _is_first_pass()


def _is_first_pass() -> bool:
    # not compiled: the compiler breaks its graph at what reads the call stack
    # autograd follows a function from which it will come back, as those of reentrant checkpoints
    return _first.get() or any(isinstance(first, FunctionCtx) and first.next_functions
                               for first in enclosing()[1])


@contextmanager
def first_pass() -> Iterator[None]:
    """Inside, passes without gradients are the first ones of calls that run again with gradients,
    whoever repeats them: they count, and what repeats them undoes what the repetition counts.
    """
    token = _first.set(True)
    try:
        yield
    finally:
        _first.reset(token)
