"""A block whose weights and optimizer state are in files."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from moe_plugin.memory.copier import Copier, Ticket
from moe_plugin.memory.flat import FlatLayout, absent, aligned_buffer
from moe_plugin.memory.tiers import DiskTier, TierBuffer, TierError, TierTensor
from moe_plugin.memory.weights.blocks import (
    MakeOptimizer,
    OptimizerStateBuffer,
    Scale,
    StreamedBlock,
    drop_gradients,
    scale_gradients,
    set_state,
    state_of,
)


class DiskBlock(StreamedBlock):
    """Weights and state in files; both are stepped in memory and written again."""

    def __init__(self, number: int, module: nn.Module, make_optimizer: MakeOptimizer,
                 tier: DiskTier) -> None:
        super().__init__(number, module, make_optimizer)
        self.tier = tier
        self._weights = TierBuffer(tier)
        self._state = TierBuffer(tier)
        self._state_layout = FlatLayout.of([])
        self._state_ticket: Ticket | None = None
        self._gradients: dict[int, tuple[TierTensor, Ticket]] = {}  # that wait for the step
        self._flat_N: Tensor | None = None
        self._state_N: Tensor | None = None  # where its state is, while it is in memory
        flat_N = aligned_buffer(self.layout.nbytes, "cpu")
        self.layout.fill(flat_N, self.params)
        self._weights.put(flat_N)
        self.detach()
        self._optimize(self.params)

    @property
    def returned_bytes(self) -> int:
        """See `StreamedBlock`: the weights, and the state, which comes and goes."""
        return (self.layout.nbytes if self.trained else 0) + 2 * self._state_layout.nbytes

    def fetch(self, copier: Copier, flat_N: Tensor) -> Ticket:
        return self._weights.fetch(copier, flat_N)

    def attach(self, flat_N: Tensor | None) -> None:
        self._weights.settle()  # what was read is what was to be written before
        super().attach(flat_N)
        self._flat_N = flat_N

    def detach(self) -> None:
        super().detach()
        self._flat_N = None

    def fetch_state(self, copier: Copier, room: OptimizerStateBuffer) -> None:
        if self._state.held is not None and self._state_ticket is None:
            self._state_N = room.of(self._state_layout.nbytes)
            self._state_ticket = self._state.fetch(copier, self._state_N)

    def keep_gradients(self, copier: Copier) -> None:
        self._gradients = {}
        for i in self.trained:  # one by one: what began is known where a later one fails
            if self.params[i].grad is not None:
                self._gradients[i] = self.tier.put_later(copier, self.params[i].grad)
        drop_gradients(self.params)

    def wait_kept(self) -> None:
        for _, ticket in self._gradients.values():
            ticket.wait()

    def _take_gradients(self) -> None:
        for i, (held, _) in self._gradients.items():
            p = self.params[i]
            p.grad = torch.empty(held.shape, dtype=held.dtype)
            self.tier.read_into(held, p.grad)
        self._free_gradients()

    def _free_gradients(self) -> None:
        for held, _ in self._gradients.values():
            self.tier.free(held)
        self._gradients = {}

    def forget_gradients(self) -> None:
        for i, (_, ticket) in list(self._gradients.items()):
            try:
                ticket.wait()
            except TierError:  # it has given its room back
                del self._gradients[i]
        self._free_gradients()
        super().forget_gradients()

    def step(self, copier: Copier, room: OptimizerStateBuffer, scale: Scale | None = None) -> bool:
        """See `StreamedBlock`; weights are attached."""
        if self.optimizer is None:
            drop_gradients(self.params)
            return True
        if scale is not None:
            self.wait_kept()
            self._take_gradients()
            scale_gradients(self.params, scale)
        self._place_state(copier, room)
        self.optimizer.step()
        drop_gradients(self.params)
        self._weights.put_later(copier, self._flat_N)
        self._leave_state(copier, room)
        return True

    def _place_state(self, copier: Copier, room: OptimizerStateBuffer) -> None:
        self.fetch_state(copier, room)
        if self._state_ticket is not None:
            self._state_ticket.wait()
            self._state.settle()
            views = self._state_layout.views(self._state_N)
            set_state(self.optimizer, dict(zip(sorted(state_of(self.optimizer)), views,
                                                strict=True)))
            self._state_ticket = None

    def _leave_state(self, copier: Copier, room: OptimizerStateBuffer) -> None:
        state = state_of(self.optimizer)
        if not state:
            return
        tensors = [state[key] for key in sorted(state)]
        layout = FlatLayout.of(tensors)
        if layout != self._state_layout or self._state_N is None:  # the first step, or a new one
            if self._state_N is not None:
                tensors = [x.clone() for x in tensors]  # some lie where they are copied to
            self._state_N = room.of(layout.nbytes)
            room.wait()
        views = layout.views(self._state_N)
        for view, x in zip(views, tensors, strict=True):
            if x.data_ptr() != view.data_ptr():
                view.copy_(x)
        self._state_layout = layout
        room.left(self._state.put_later(copier, self._state_N))
        self._state_N = None
        set_state(self.optimizer, {key: absent(x) for key, x in state.items()})

    def read(self) -> list[Tensor]:
        flat_N = aligned_buffer(self.layout.nbytes, "cpu")
        self._weights.read(flat_N)
        return self.layout.views(flat_N)

    def write(self, weights: Sequence[Tensor]) -> None:
        flat_N = aligned_buffer(self.layout.nbytes, "cpu")
        self.layout.fill(flat_N, weights)
        self._weights.put(flat_N)

    def _staged(self, weights: Sequence[Tensor]) -> Callable[[bool], None]:
        flat_N = aligned_buffer(self.layout.nbytes, "cpu")
        self.layout.fill(flat_N, weights)
        return self._weights.stage(flat_N)

    def state_tensors(self) -> dict[tuple[int, str], Tensor]:
        state = state_of(self.optimizer)
        if not state:
            return {}
        flat_N = aligned_buffer(self._state_layout.nbytes, "cpu")
        self._state.read(flat_N)
        return dict(zip(sorted(state), self._state_layout.views(flat_N), strict=True))

    def load_state(self, state: dict[tuple[int, str], Tensor]) -> None:
        tensors = [state[key] for key in sorted(state)]
        self._state_layout = FlatLayout.of(tensors)
        if tensors:
            flat_N = aligned_buffer(self._state_layout.nbytes, "cpu")
            self._state_layout.fill(flat_N, tensors)
            self._state.put(flat_N)
        super().load_state({key: absent(x) for key, x in state.items()})

    def settle(self) -> None:
        self._weights.settle()
        self._state.settle()
