"""The optimizer state of a block, stored either in memory or in files."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from moe_plugin.memory.copier import Copier, Ticket
from moe_plugin.memory.passes import FlatLayout, absent, aligned_buffer
from moe_plugin.memory.tiers import DiskTier, TierBuffer

State = Mapping[tuple[int, str], Tensor]  # by number of the parameter and name
_MAIN = "main weight"  # key of a main weight, which is stored with the optimizer's state


def _params(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def state_of(optimizer: torch.optim.Optimizer | None, numbers: bool = False
             ) -> dict[tuple[int, str], Tensor]:
    """Return the tensors of the optimizer state, or its scalars if `numbers` is true."""
    if optimizer is None:
        return {}
    return {(i, name): x for i, p in enumerate(_params(optimizer))
            for name, x in optimizer.state.get(p, {}).items()
            if isinstance(x, Tensor) and (x.dim() == 0) == numbers}


def set_state(optimizer: torch.optim.Optimizer | None, state: State) -> None:
    """Replace the tensors of the optimizer state. `state_of` returns tensors in the same form."""
    if optimizer is not None:
        params = _params(optimizer)
        for (i, name), x in state.items():
            optimizer.state[params[i]][name] = x


class OptimizerStateBuffer:
    """A buffer in host memory that contains the optimizer state of one block at a time.

    The buffer is large enough for the largest state of any block.
    """

    def __init__(self) -> None:
        self._flat_N = aligned_buffer(0, "cpu")
        self._last: Ticket | None = None

    def of(self, nbytes: int) -> Tensor:
        """Return a uint8 view [nbytes] of the buffer. If a larger buffer replaces the previous
        buffer, running jobs keep the previous buffer alive.
        """
        if self._flat_N.numel() < nbytes:
            self._flat_N = aligned_buffer(nbytes, "cpu")
        return self._flat_N[:nbytes]

    def left(self, ticket: Ticket) -> None:
        """Record that a job reads the buffer. Later jobs of the same copier may overwrite it."""
        self._last = ticket

    def wait(self) -> None:
        """Wait until the caller may overwrite the buffer."""
        if self._last is not None:
            self._last.wait()
        self._last = None

    @property
    def nbytes(self) -> int:
        return self._flat_N.numel()


class StateInFiles:
    """Optimizer state that is stored in files. For an optimizer step, the state is read into a
    shared buffer.

    The files also contain parameters that are not stored anywhere else.
    """

    def __init__(self, tier: DiskTier, optimizer: torch.optim.Optimizer | None) -> None:
        self.optimizer, self._held = optimizer, TierBuffer(tier)
        self._keys, self._layout = list[tuple[int, str]](), FlatLayout.of([])
        self._ticket: Ticket | None = None
        self._flat_N: Tensor | None = None  # the buffer of the state, while the state is in memory
        self._mains: dict[int, nn.Parameter] = {}  # by number of the parameter

    def hold_mains(self, values: Mapping[int, Tensor]) -> None:
        """Store the given parameters together with the optimizer state.

        values: mapping from the `id()` of a parameter to the tensor to store.
        """
        assert self.optimizer is not None
        self._mains = {i: p for i, p in enumerate(_params(self.optimizer)) if id(p) in values}
        self.load({(i, _MAIN): values[id(p)] for i, p in self._mains.items()})

    def mains(self) -> dict[int, Tensor]:
        """Return copies of the stored parameters, by the `id()` of the parameter. This method must
        not be called while a copy is in progress.
        """
        held = self._tensors() if self._mains else {}
        return {id(p): held[i, _MAIN] for i, p in self._mains.items()}

    def stage_mains(self, values: Mapping[int, Tensor]) -> Callable[[bool], None]:
        """Store new parameters in addition to the current parameters. Call the returned function
        with True to use the new parameters, or with False to discard them.
        """
        state = self._tensors() | {(i, _MAIN): values[id(p)] for i, p in self._mains.items()}
        flat_N = aligned_buffer(self._layout.nbytes, "cpu")
        self._layout.fill(flat_N, [state[key] for key in sorted(state)])
        return self._held.stage(flat_N)

    def _replace_state(self, state: State) -> None:
        set_state(self.optimizer, {key: x for key, x in state.items() if key[1] != _MAIN})
        for i, p in self._mains.items():
            p.data = state[i, _MAIN]

    @property
    def nbytes(self) -> int:
        return self._layout.nbytes

    def fetch(self, copier: Copier, room: OptimizerStateBuffer) -> None:
        """Start copying the optimizer state to memory, unless the copy is already in progress."""
        if self._held.held is not None and self._ticket is None:
            self._flat_N = room.of(self._layout.nbytes)
            self._ticket = self._held.fetch(copier, self._flat_N)

    def place(self, copier: Copier, room: OptimizerStateBuffer) -> None:
        """Load the state into the optimizer, and wait until the state is complete."""
        self.fetch(copier, room)
        if self._ticket is not None:
            self._ticket.wait()
            self._held.settle()
            assert self._flat_N is not None
            self._replace_state(self._state_in(self._flat_N))
            self._ticket = None

    def leave(self, copier: Copier, room: OptimizerStateBuffer) -> None:
        """Start writing the optimizer's current state to files, and remove the state from memory.
        """
        state = state_of(self.optimizer) | {(i, _MAIN): p.data for i, p in self._mains.items()}
        if not state:
            return
        tensors = [state[key] for key in sorted(state)]
        layout = FlatLayout.of(tensors)
        # in the first step, or if the layout changed
        if layout != self._layout or self._flat_N is None:
            if self._flat_N is not None:
                # some tensors lie in the buffer that is overwritten
                tensors = [x.clone() for x in tensors]
            self._flat_N = room.of(layout.nbytes)
            room.wait()
        for view, x in zip(layout.views(self._flat_N), tensors, strict=True):
            if x.data_ptr() != view.data_ptr():
                view.copy_(x)
        self._layout = layout
        room.left(self._held.put_later(copier, self._flat_N))
        self._keys, self._flat_N = sorted(state), None
        self._replace_state({key: absent(x) for key, x in state.items()})

    def tensors(self) -> dict[tuple[int, str], Tensor]:
        """Return a copy of the optimizer state. Must not be called while a copy is in progress."""
        return {key: x for key, x in self._tensors().items() if key[1] != _MAIN}

    def _tensors(self) -> dict[tuple[int, str], Tensor]:
        if not self._keys:
            return {}
        flat_N = aligned_buffer(self._layout.nbytes, "cpu")
        self._held.read(flat_N)
        return self._state_in(flat_N)

    def load(self, state: State) -> None:
        """Replace the optimizer state, but not the stored parameters."""
        if self._mains and self._keys:
            held = self._tensors()
            state = {**state, **{(i, _MAIN): held[i, _MAIN] for i in self._mains}}
        self._keys = sorted(state)
        tensors = [state[key] for key in self._keys]
        self._layout = FlatLayout.of(tensors)
        if tensors:
            flat_N = aligned_buffer(self._layout.nbytes, "cpu")
            self._layout.fill(flat_N, tensors)
            self._held.put(flat_N)
        self._replace_state({key: absent(x) for key, x in state.items()})

    def settle(self) -> None:
        """Wait until the write in progress is complete, and raise an error if it failed."""
        self._held.settle()

    def _state_in(self, flat_N: Tensor) -> dict[tuple[int, str], Tensor]:
        return dict(zip(self._keys, self._layout.views(flat_N), strict=True))
