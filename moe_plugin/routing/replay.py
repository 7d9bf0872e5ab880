"""Recording of the routing in a layer's first pass, so that the recomputation of activations uses
the same routing.

With activation checkpointing, a layer runs twice: once in the forward pass, and again during the
backward pass. If the second pass sent a token to a different expert, for example because of noise
or rounding, shapes and gradients would be wrong. Shapes and gradients would also be wrong if the
second pass read a count that other passes have changed in the meantime. The second pass therefore
reuses the choices of the first pass.

Each recording belongs to one call of a checkpoint. The recording is stored on an object that torch
keeps for this call from the first pass until the recomputation. For a reentrant checkpoint (of
torch, fairseq, Megatron or DeepSpeed), this object is the `ctx` of the `torch.autograd.Function`.
For torch's non-reentrant checkpoint, this object is the frame object of the checkpoint. Both passes
find the object on Python's call stack (`enclosing`). As a result, recordings cannot be confused,
whatever the order of the backward passes. A forward pass under `no_grad` is not recorded.
Recordings are freed together with the graph.

If a recomputation skips a random draw, it leaves the random generators in the same state as the
first pass. Dropout after the router is therefore reproduced exactly.

Under torch.compile, nothing is recorded, because the backward pass reuses the first pass's tensors.
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
# Returns the active saved-tensor hooks, or None.
_top_hooks: Callable[[bool], Any] = torch._C._autograd._top_saved_tensors_default_hooks
_ATTRIBUTE = "moe_plugin_recording"  # set on the object that identifies a checkpointed call


class Recording:
    """The recorded choices of a checkpointed call: a list per key, in the order of the calls."""

    def __init__(self) -> None:
        self._entries: dict[Key, list[RecordedChoice]] = {}
        self._read: dict[Key, int] = {}  # entries already read in the backward pass `_task`
        self._task = -1

    @classmethod
    def of(cls, owner: Any) -> Recording:
        """Return the recording of a checkpointed call. If there is no recording, create one."""
        recording: Recording | None = getattr(owner, _ATTRIBUTE, None)
        if recording is None:
            recording = cls()
            setattr(owner, _ATTRIBUTE, recording)
        return recording

    def add(self, key: Key, entry: RecordedChoice) -> None:
        self._entries.setdefault(key, []).append(entry)

    def take(self, key: Key, shape: tuple[int, ...] | None) -> RecordedChoice:
        """Return the next choice recorded under this key in the current backward pass.

        Raises:
            RuntimeError: If the first pass made fewer choices, or if the shapes differ.
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
    """If this frame runs a `torch.autograd.Function`, return its `ctx`. Otherwise, return None."""
    code = frame.f_code
    if not code.co_argcount or code.co_varnames[0] == "self":
        return None
    ctx = frame.f_locals.get(code.co_varnames[0])
    return ctx if isinstance(ctx, FunctionCtx) else None


def _new_frame(frame: FrameType) -> Any:
    """Return the frame object that a non-reentrant checkpoint has created for its first pass."""
    if "gen" in frame.f_code.co_varnames:  # torch creates the frame object in a generator
        frame = getattr(frame.f_locals.get("gen"), "gi_frame", None) or frame
    return _frame_object(frame, "new_frame")  # Transformer Engine creates it in the function


def _recomputed_frame(frame: FrameType) -> Any:
    """If a non-reentrant checkpoint recomputes a pass, return the first pass's frame object."""
    return _frame_object(frame, "frame")


def _frame_object(frame: FrameType, name: str) -> Any:
    code = frame.f_code
    frame_object = frame.f_locals.get(name) if name in code.co_varnames + code.co_freevars else None
    return frame_object if hasattr(frame_object, "recompute_fn") else None


# Maps the name of a function that runs a checkpointed call to a getter of the object that
# identifies the call, and to whether the function is the recomputation.
_PLACES: dict[str, tuple[Callable[[FrameType], Any], bool]] = {
    "forward": (_function_context, False), "backward": (_function_context, True),
    "checkpoint": (_new_frame, False), "_checkpoint_impl": (_new_frame, False),  # since torch 2.14
    "unpack_hook": (_recomputed_frame, True),
}


def enclosing() -> tuple[Any, list[Any]]:
    """Return the innermost call that is being recomputed, or None, and the first passes inside it.

    Each call is represented by an object that exists from its first pass until its recomputation.
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
    """Return whether this pass has gradients and no hook replaces the tensors saved by autograd.

    A pass with gradients and without such hooks is never recomputed, so its choices are not
    recorded. `runs_once` does not inspect the call stack.
    """
    if _active.get() is not None:
        return False
    return not training or (torch.is_grad_enabled() and _top_hooks(True) is None
                            and torch._C._current_graph_task_id() == -1)


def replayed(owner: object, choose: Callable[[], T], training: bool, *, what: str = "choice",
             shape: tuple[int, ...] | None = None, values: bool = True) -> T:
    """In a recomputation, return the recorded value. In any other pass, return `choose()`.

    Args:
        owner: object that makes the choice, such as a router or a layout tuner.
        choose: function that returns the value.
        training: True if the layer is in training mode. If `training` is False, the value is
            recorded and replayed only by tapes.
        what: label of the value. A recorded value is returned only for the same owner and label.
        shape: expected shape of the recorded value. If `shape` is None, the shape is not checked.
        values: False if the value must not be recorded on tapes, because it is used only by a pass
            and its recomputation.
    Raises:
        RuntimeError: If the recomputation does not match the first pass.
        ValueError: If a tape contains a value with another label at this position.
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
    """The recorded choices of a pass, in the order of the calls. Save both `ids` and `calls`.

    Attributes:
        ids: list of recorded values.
        calls: for each value, its label and the index of its module. Modules are numbered in the
            order of their first calls.
    """

    def __init__(self) -> None:
        self.ids: list[Any] = []
        self.calls: list[tuple[int, str]] = []
        self.position: int | None = None  # None while recording
        self._numbers: dict[object, int] = {}  # numbers of the modules seen in this pass
        self._moves: list[Any] = []  # moves of generators; absent after the tape was loaded

    def begin(self, position: int | None) -> None:
        """Start recording if the position is None. Otherwise, start replaying from this position.
        """
        if position is None:
            self.ids, self.calls, self._moves = [], [], []
        elif len(self.calls) != len(self.ids):
            raise ValueError(
                f"The recording has {len(self.ids)} values but {len(self.calls)} entries in "
                "`calls`. Save and load both tape.ids and tape.calls.")
        self.position, self._numbers = position, {}

    def replayed(self, choose: Callable[[], Any], owner: object, what: str,
                 shape: tuple[int, ...] | None) -> RecordedChoice:
        """Record `choose()`, or return the next recorded choice if it belongs to this call."""
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
        """Raise a `ValueError` if the replay made fewer calls than the recording contains."""
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
    """A reusable context manager that records a tape if the position is None, or replays it."""

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
    """Record the routing of all layers that are called in this context. Use `replay_routing` to
    replay the recording.

    Recomputations of activations are not recorded. Both attributes of the tape can be saved with
    `torch.save`. `ids` contains the choices of the routers and, if weights depend on noise, also
    the noise. `calls` identifies the call of each value.
    """
    return _Use(_Tape(), None)


def replay_routing(tape: _Tape) -> AbstractContextManager[_Tape]:
    """Replay recorded choices. The calls must be the same, in the same order, as during recording.

    The model's weights and the noise may differ from those of the recording. The gate weights of
    the recorded choices are computed again, and the routers count their loads as usual.

    Raises:
        ValueError: If the calls or the shapes differ from the recording. In training mode, some
            routers record additional values: gshard, noisy_topk, dense_to_sparse, any router with
            `second_expert_policy: random`, and any router with the `global_batch` loss. These
            routers must be replayed in the same mode (training or evaluation) as during recording.
    """
    return _Use(tape, 0)


def checkpoint(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call `torch.utils.checkpoint.checkpoint`, non-reentrant. The routing of the first pass is
    recorded and then used in the recomputation.

    If weights depend on noise that is resampled (`router.noise`, `router.input_jitter`,
    `router.input_dropout`), do not disable `preserve_rng_state`.
    """
    from torch.utils.checkpoint import checkpoint as torch_checkpoint

    return torch_checkpoint(fn, *args, use_reentrant=False, **kwargs)


def routing_replay() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Return two empty contexts to use as `context_fn` of `torch.utils.checkpoint`. Routing is
    replayed even without these contexts.
    """
    return nullcontext(), nullcontext()


def replaying() -> bool:
    """Return whether the current pass recomputes a call that had gradients in its first pass.

    Only a non-reentrant checkpoint runs the first pass with gradients. Code that counts passes must
    not count this pass again.
    """
    if torch.compiler.is_compiling() or not inside_backward():
        return False
    source, _ = enclosing()
    return source is not None and not isinstance(source, FunctionCtx)
