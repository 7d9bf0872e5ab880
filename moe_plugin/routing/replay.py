"""Recording of routing in a layer's first pass, for use when activations are recomputed.

With activation checkpointing, a layer runs twice: in the forward pass, and again during the
backward pass. Shapes and gradients would be wrong if the second pass sent a token to a different
expert, for example because of noise or rounding. The same happens if the second pass read a count
that other passes have changed. Therefore the second pass reuses the choices of the first pass.

Each recording belongs to one call of a checkpoint. The recording is stored on the object that torch
keeps for this call from the first pass to the recomputation. For a reentrant checkpoint (of torch,
fairseq, Megatron or DeepSpeed) this object is the `ctx` of the `torch.autograd.Function`. For
torch's non-reentrant checkpoint, it is the frame object of the checkpoint. Both passes find this
object on Python's call stack (`enclosing`). As a result, recordings are never confused, regardless
of the order of the backward passes. A forward pass under `no_grad` records nothing, and recordings
are freed together with the graph.

A recomputation that skips a random draw leaves the random generators in the same state as the first
pass, so dropout after the router also repeats.

Under torch.compile nothing is recorded, because the compiled backward pass reuses the values of the
first pass.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar, Token
from types import FrameType
from typing import Any, TypeVar

import torch
from torch.autograd.function import FunctionCtx

from moe_plugin.utils.determinism import RecordedChoice
from moe_plugin.utils.machine import inside_backward

T = TypeVar("T")
Key = tuple[object, str]  # the owner of a choice, and the label of the choice
_active: ContextVar["_Tape | None"] = ContextVar("moe_plugin_routing_tape", default=None)
# Returns the active saved-tensor hooks, or None. Only torch 2.8 and later have this function.
_top_hooks: Callable[[bool], Any] = getattr(
    torch._C._autograd, "_top_saved_tensors_default_hooks", lambda _: True)
_ATTRIBUTE = "moe_plugin_recording"  # set on the object that identifies a checkpointed call


class Recording:
    """The recorded choices of a checkpointed call: for each key, a list in call order."""

    def __init__(self) -> None:
        self._entries: dict[Key, list[RecordedChoice]] = {}
        self._read: dict[Key, int] = {}  # entries already read in the backward pass `_task`
        self._task = -1

    @classmethod
    def of(cls, owner: Any) -> Recording:
        """Return the recording of a checkpointed call, and create one if there is none."""
        recording: Recording | None = getattr(owner, _ATTRIBUTE, None)
        if recording is None:
            recording = cls()
            setattr(owner, _ATTRIBUTE, recording)
        return recording

    def add(self, key: Key, entry: RecordedChoice) -> None:
        self._entries.setdefault(key, []).append(entry)

    def take(self, key: Key, shape: tuple[int, ...] | None) -> RecordedChoice:
        """Return the next choice with this key in the current backward pass.

        Raises:
            RuntimeError: If the first pass made fewer choices with this key, or if the shape
                differs.
        """
        task = torch._C._current_graph_task_id()
        if task != self._task:  # with `retain_graph` every backward pass recomputes
            self._task, self._read = task, {}
        entries, index = self._entries.get(key, []), self._read.get(key, 0)
        if index == len(entries) and task == -1:  # a saved tensor is read again outside backward
            index = 0
        if index >= len(entries):
            raise RuntimeError(
                f"The recomputation requests {_name(key)} {index + 1} times, but the first pass "
                f"recorded it {len(entries)} times. {_SAME_CALLS}")
        self._read[key] = index + 1
        recorded_shape = getattr(entries[index].value, "shape", None)
        if shape is not None and tuple(recorded_shape or ()) != shape:
            raise RuntimeError(
                f"The recomputation requests {_name(key)} with shape {shape}, but the first pass "
                f"recorded shape {tuple(recorded_shape or ())}. {_SAME_CALLS}")
        return entries[index]


_SAME_CALLS = ("When a checkpointed function runs again, it must call the same layers with the "
               "same tokens and in the same mode (train() or eval()).")


def _name(key: Key) -> str:
    owner, what = key
    number = getattr(getattr(owner, "host", None), "layer_number", None)
    layer = "" if number is None else f" of MoE layer {number}"
    return f"the {what} of {type(owner).__name__}{layer}"


def _function_context(frame: FrameType) -> Any:
    """Return the `ctx` of the `torch.autograd.Function` that runs in this frame, or None."""
    code = frame.f_code
    if not code.co_argcount or code.co_varnames[0] == "self":
        return None
    ctx = frame.f_locals.get(code.co_varnames[0])
    return ctx if isinstance(ctx, FunctionCtx) else None


def _new_frame(frame: FrameType) -> Any:
    """Return the frame object that a non-reentrant checkpoint created for its first pass."""
    if "gen" in frame.f_code.co_varnames:  # torch creates the frame object in a generator
        frame = getattr(frame.f_locals.get("gen"), "gi_frame", None) or frame
    return _frame_object(frame, "new_frame")  # Transformer Engine creates it in the function


def _recomputed_frame(frame: FrameType) -> Any:
    """Return the frame object of the first pass that a non-reentrant checkpoint recomputes."""
    return _frame_object(frame, "frame")


def _frame_object(frame: FrameType, name: str) -> Any:
    code = frame.f_code
    frame_object = frame.f_locals.get(name) if name in code.co_varnames + code.co_freevars else None
    return frame_object if hasattr(frame_object, "recompute_fn") else None


# Maps the name of a function that runs a checkpointed call to a getter of the object that
# identifies the call, and to whether the function is the recomputation.
_PLACES: dict[str, tuple[Callable[[FrameType], Any], bool]] = {
    "forward": (_function_context, False), "backward": (_function_context, True),
    "checkpoint": (_new_frame, False), "unpack_hook": (_recomputed_frame, True),
}


def enclosing() -> tuple[Any, list[Any]]:
    """Return the innermost recomputed call (or None) and the first passes that run inside it.

    Each call is represented by the object that exists from its first pass to its recomputation.
    """
    firsts: list[Any] = []
    frame: FrameType | None = sys._getframe(1)
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
    """Return true if this pass has gradients and no hook replaces the tensors that autograd saves.

    Such a pass is never recomputed, so nothing is recorded. The call stack is not inspected.
    """
    if _active.get() is not None:
        return False
    return not training or (torch.is_grad_enabled() and _top_hooks(True) is None
                            and torch._C._current_graph_task_id() == -1)


def replayed(owner: object, choose: Callable[[], T], training: bool, *, what: str = "choice",
             shape: tuple[int, ...] | None = None, values: bool = True) -> T:
    """Return `choose()` in a first or ordinary pass, and the recorded value in a recomputation.

    Args:
        owner: the object that makes the choice (a router or a layout tuner).
        choose: function that computes the value.
        training: whether the layer is in training mode. If False, only tapes record and replay.
        what: label of the value. A recording returns a value only for the same owner and label.
        shape: expected shape of a recorded value. If `shape` is None, the shape is not checked.
        values: False for a value that is used only by a pass and its recomputation, not by tapes.
    Raises:
        RuntimeError: If the first pass and the recomputation do not match.
        ValueError: If a tape contains a different kind of value at this position.
    """
    if torch.compiler.is_compiling():
        # The compiler recomputes inside one graph, from the values of the first pass.
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
        entry = RecordedChoice.of(choose)
    for first in firsts:
        Recording.of(first).add((owner, what), entry)
    value: T = entry.value
    return value


class _Tape:
    """The recorded choices of a pass in the order of calls. Always save both `ids` and `calls`.

    Attributes:
        ids: the recorded values.
        calls: for each value, its label and the index of its module in the order of first calls.
    """

    def __init__(self) -> None:
        self.ids: list[Any] = []
        self.calls: list[tuple[int, str]] = []
        self.position: int | None = None  # None while recording
        self._numbers: dict[object, int] = {}  # numbers of the modules seen in this pass
        self._moves: list[Any] = []  # moves of generators; absent after the tape was loaded

    def begin(self, position: int | None) -> None:
        """Start to record (if the position is None) or to replay from this position."""
        if position is None:
            self.ids, self.calls, self._moves = [], [], []
        elif len(self.calls) != len(self.ids):
            raise ValueError(
                f"The recording has {len(self.ids)} values but {len(self.calls)} entries in "
                "`calls`. Save and load both tape.ids and tape.calls.")
        self.position, self._numbers = position, {}

    def replayed(self, choose: Callable[[], Any], owner: object, what: str,
                 shape: tuple[int, ...] | None) -> RecordedChoice:
        """Record `choose()`, or return the next recorded choice if it matches this call."""
        call = (self._numbers.setdefault(owner, len(self._numbers) + 1), what)
        if self.position is None:
            entry = RecordedChoice.of(choose)
            self.ids.append(entry.value)
            self.calls.append(call)
            self._moves.append(entry.moves)
            return entry
        self._check(self.position, call, shape)
        moves = self._moves[self.position] if len(self._moves) == len(self.ids) else ()
        entry = RecordedChoice(self.ids[self.position], moves)
        entry.move_generators()
        self.position += 1
        return entry

    def check_all_used(self) -> None:
        """Raise a `ValueError` if a replay made fewer calls than were recorded."""
        if self.position is not None and self.position < len(self.ids):
            raise _differs(self.position, "nothing more",
                           _described(self.calls[self.position]))

    def _check(self, position: int, call: tuple[int, str], shape: tuple[int, ...] | None) -> None:
        if position >= len(self.ids):
            raise _differs(position, _described(call), "nothing more")
        recorded = tuple(self.calls[position])
        if recorded != call:
            raise _differs(position, _described(call), _described(recorded))
        stored = None if shape is None else tuple(self.ids[position].shape)
        if stored != shape:
            raise _differs(position, f"{_described(call)} of shape {shape}", f"shape {stored}")


def _described(call: tuple[Any, ...]) -> str:
    return f"the {call[1]} of module {call[0]}"


def _differs(position: int, asked: str, recorded: str) -> ValueError:
    return ValueError(
        f"Call {position + 1} of the replay does not match the recording: the replay requests "
        f"{asked}, but the recording has {recorded}. Record and replay the same calls of the same "
        "layers, with the same number of tokens and in the same mode (train() or eval()).")


class _Use:
    """A reusable context manager that records on a tape (at position None) or replays it."""

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
    """Record the routing of all layers called in this context, for use with `replay_routing`.

    Recomputations of activations are not recorded again. Both parts of the tape can be saved with
    `torch.save`. `ids` contains the choices of routers, and the noise if weights depend on it.
    `calls` contains the call to which each value belongs.
    """
    return _Use(_Tape(), None)


def replay_routing(tape: _Tape) -> AbstractContextManager[_Tape]:
    """Replay recorded choices for the same calls in the same order.

    The model weights and the noise may differ from the recording. The gate weights of the choices
    are computed again, and routers count their loads as usual.

    Raises:
        ValueError: If calls or shapes differ from the recording. In training, some routers record
            additional values (gshard, `second_expert_policy: random`, noisy_topk, dense_to_sparse,
            and any router with the loss `global_batch`). These routers must be replayed in the same
            mode (training or evaluation) as during the recording.
    """
    return _Use(tape, 0)


def checkpoint(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call `torch.utils.checkpoint.checkpoint`, non-reentrant. The routing of the first pass is
    recorded, and replayed in the recomputation.

    Keep `preserve_rng_state` enabled if weights depend on noise that is drawn again
    (`router.noise`, `router.input_jitter`, `router.input_dropout`).
    """
    from torch.utils.checkpoint import checkpoint as torch_checkpoint

    return torch_checkpoint(fn, *args, use_reentrant=False, **kwargs)


def routing_replay() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Return two empty contexts for `context_fn` of `torch.utils.checkpoint`. Replay also works
    without these contexts.
    """
    return nullcontext(), nullcontext()


def replaying() -> bool:
    """Return true if this code recomputes a call that had gradients in its first pass.

    This happens only with a non-reentrant checkpoint. Code that counts passes must not count this
    pass.
    """
    if torch.compiler.is_compiling() or not inside_backward():
        return False
    source, _ = enclosing()
    return source is not None and not isinstance(source, FunctionCtx)
