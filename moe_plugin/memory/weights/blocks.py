"""A block of a model whose weights are streamed: its weights are loaded, unloaded and updated."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from moe_plugin.experts.ffn import FFNExperts
from moe_plugin.memory.copier import Copier, Ticket
from moe_plugin.memory.passes import FlatLayout, absent, aligned_buffer
from moe_plugin.memory.tiers import DiskTier, HostTier, Tier, TierBuffer, TierTensor
from moe_plugin.memory.weights.optimizer_state import (
    OptimizerStateBuffer,
    StateInFiles,
    set_state,
    state_of,
)

MakeOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
Scale = Callable[[list[Tensor]], object]
HALVES = (torch.float16, torch.bfloat16)


class StreamedBlock:
    """A block with its module, its optimizer and the storage of its weights.

    Args:
        number: index of the block in the model.
        module: module of the block on the device.
        make_optimizer: function that creates the optimizer for the trained parameters.
        tier: tier for weights, gradients and optimizer state. If the tier is host memory, the
            optimizer runs on the host, and the weights are copied to the device. If the tier
            consists of files, weights and optimizer state are loaded into memory, updated and
            written back. Without a tier, everything stays on the device.
        main_weights: whether the optimizer updates a float32 copy (main weight) of each 16-bit
            parameter. The main weights are stored with the optimizer state. The device receives the
            rounded main weights.

    Attributes:
        layout: layout of the weights in one buffer.
        streams: whether the weights are streamed.
        mains: indices of the parameters that have a float32 main weight.
        graded: the parameters that have gradients after the backward pass. These are the parameters
            of the module. Parameters that have a main weight are replaced with it.
        stepped: the parameters that the optimizer updates.
        optimizer: the optimizer, or None if no parameter is trained.
    Raises:
        ValueError: If a parameter is not contiguous.
    """

    def __init__(self, number: int, module: nn.Module, make_optimizer: MakeOptimizer,
                 tier: Tier | None, main_weights: bool = False) -> None:
        self.number, self.module, self.tier = number, module, tier
        self.names = [name for name, _ in module.named_parameters()]
        self.params = list(module.parameters())
        for name, p in zip(self.names, self.params, strict=True):
            if not p.is_contiguous():
                raise ValueError(f"block {number}: parameter {name} is not contiguous, so its "
                                 "memory layout would change; make it contiguous() first")
        self.layout = FlatLayout.of(self.params)
        self.trained = [i for i, p in enumerate(self.params) if p.requires_grad]
        self.mains = [i for i in self.trained if main_weights and self.params[i].dtype in HALVES]
        self.streams = tier is not None
        in_files = isinstance(tier, DiskTier)
        values = [self.params[i].detach().float() for i in self.mains]
        self.graded = self.stepped = self._with_mains(
            [absent(x) for x in values] if self.streams else values)
        # weights that are rounded from the main weights
        self._lower: Sequence[Tensor] = self.params
        self._flat_N: Tensor | None = None  # buffer on the device with the attached weights
        self._coming: Ticket | None = None  # the latest fetch of the weights
        # gradients stored until the step: indices of their parameters, their storage, and the copy
        self._aside: tuple[list[int], list[TierTensor], Ticket] | None = None
        if tier is not None:
            self._leave_device(tier)
        self.optimizer = make_optimizer(
            [self.stepped[i] for i in self.trained]) if self.trained else None
        self._state = StateInFiles(tier, self.optimizer) if in_files else None
        if self._state is not None and self.mains:
            self._state.hold_mains({id(self.stepped[i]): x
                                    for i, x in zip(self.mains, values, strict=True)})

    def _with_mains(self, values: Sequence[Tensor]) -> list[nn.Parameter]:
        """Return the parameters, where the parameters of `mains` are replaced with new parameters.
        Attributes set by hosts are kept.
        """
        parameters = list(self.params)
        for i, x in zip(self.mains, values, strict=True):
            parameters[i] = nn.Parameter(x)
            vars(parameters[i]).update(vars(self.params[i]))
        return parameters

    def _leave_device(self, tier: Tier) -> None:
        self._weights = TierBuffer(tier)
        in_host = isinstance(tier, HostTier)
        flat_N = aligned_buffer(self.layout.nbytes, "cpu", tier.pinned_for if in_host else None)
        self.layout.fill(flat_N, self.params)
        if in_host:
            self._weights.held = TierTensor(tuple(flat_N.shape), flat_N.dtype, flat_N)
            # the optimizer updates views of the buffer in place, so that one copy moves all weights
            self._lower = self.layout.views(flat_N)
            self.stepped = [nn.Parameter(view.float() if i in self.mains else view, p.requires_grad)
                            for i, (view, p) in enumerate(zip(self._lower, self.params,
                                                              strict=True))]
            for stepped, p in zip(self.stepped, self.params, strict=True):
                vars(stepped).update(vars(p))  # the marks of hosts
        else:
            self._weights.put(flat_N)
        self.detach()

    @property
    def returned_bytes(self) -> int:
        """Number of bytes that are copied in a step in addition to the weights copied to the
        device.

        For host memory, these are the bytes of the gradients. For files, these are the bytes of the
        new weights, and of the optimizer state in both directions.
        """
        if self._state is not None:
            return (self.layout.nbytes if self.trained else 0) + 2 * self._state.nbytes
        return sum(self.graded[i].numel() * self.graded[i].element_size()
                   for i in self.trained if self.streams)

    @property
    def main_bytes(self) -> int:
        """Size of the main weights in bytes."""
        return sum(4 * self.params[i].numel() for i in self.mains)

    def forget_memory(self) -> None:
        """Free the memory that experts retain between calls, because the next call is in the next
        step.
        """
        for module in self.module.modules():
            if isinstance(module, FFNExperts):
                module.memory.clear()

    def fetch(self, copier: Copier, flat_N: Tensor) -> Ticket:
        """Start copying the weights of a streamed block into a buffer on the device."""
        self._coming = self._weights.fetch(copier, flat_N)
        return self._coming

    def attach(self, flat_N: Tensor) -> None:
        """Make the module use the weights in this buffer."""
        self._weights.settle()  # the fetched weights are those whose write is completed here
        self._flat_N = flat_N
        for p, view in zip(self.params, self.layout.views(flat_N), strict=True):
            p.data = view

    def detach(self) -> None:
        """Detach the weights because a different block uses the buffer."""
        self._flat_N = None
        for p in self.params if self.streams else ():
            p.data = absent(p)

    def fetch_state(self, copier: Copier, room: OptimizerStateBuffer) -> None:
        """Start copying the optimizer state from files to memory."""
        if self._state is not None:
            self._state.fetch(copier, room)

    def step(self, copier: Copier, room: OptimizerStateBuffer, scale: Scale | None = None) -> bool:
        """Perform an optimizer step and drop the gradients.

        Args:
            copier: the copier.
            room: buffer into which the optimizer state is loaded.
            scale: function that changes the gradients in place. This argument requires a previous
                call of `keep_gradients`. By default, the optimizer uses the gradients of the
                backward pass unchanged.
        Returns: True if the weights that are attached to the module are already updated.
        """
        if scale is None and self.stepped is not self.graded:
            self.keep_gradients(copier)
        self.wait_kept()
        self._take_gradients()
        if scale is not None:
            scale([p.grad for p in self.stepped if p.grad is not None])
        if self.optimizer is not None:
            self._step(self.optimizer, copier, room)
        drop_gradients(self.stepped)
        return self.stepped is self.graded

    def _step(self, optimizer: torch.optim.Optimizer, copier: Copier,
              room: OptimizerStateBuffer) -> None:
        if self._state is not None:
            self._state.place(copier, room)
        optimizer.step()
        self._follow_mains()
        if self._state is None:
            return
        drop_gradients(self.stepped)
        self._weights.put_later(copier, self._flat_N)
        self._state.leave(copier, room)

    @torch.no_grad()
    def _follow_mains(self) -> None:
        for i in self.mains:
            self._lower[i].copy_(self.stepped[i])

    def sum_gradients(self) -> None:
        """Add the 16-bit gradients of a backward pass to the gradients of the main weights."""
        for i in self.mains:
            p, main = self.params[i], self.graded[i]
            if p.grad is not None and main.grad is not None:
                main.grad.add_(p.grad)
            elif p.grad is not None:
                main.grad = p.grad.float()
            p.grad = None

    def keep_gradients(self, copier: Copier) -> None:
        """Start to copy the gradients to the tier.

        The gradients stay in the tier until `step` is called. Call `wait_kept` to wait for the
        copy.
        """
        owners = [i for i in self.trained if self.graded[i].grad is not None]
        if self.tier is None or not owners:
            return
        held, ticket = self.tier.put_later(copier, [self.graded[i].grad for i in owners])
        self._aside = (owners, held, ticket)
        drop_gradients(self.graded)

    def wait_kept(self) -> None:
        """Wait for the copy started by `keep_gradients`. Raise `TierError` if there is no space."""
        if self._aside is not None:
            _, _, ticket = self._aside
            ticket.synchronize()  # the GPU's stream does not order the optimizer in host memory

    def _take_gradients(self) -> None:
        if self._aside is not None:
            owners, held, _ = self._aside
            taken = self.tier.take(held)
            self._aside = None
            for i, gradient in zip(owners, taken, strict=True):
                self.stepped[i].grad = gradient

    def forget_gradients(self) -> None:
        """Drop all gradients after an error, including those stored in the tier."""
        if self._aside is not None:
            _, held, ticket = self._aside
            self._aside = None
            try:
                ticket.wait()
            except Exception:  # noqa: BLE001 - the error of the step is raised
                # after TierError the space is free already; after other errors its state is unknown
                held = []
            for stored in held:
                self.tier.free(stored)
        drop_gradients([*self.params, *self.graded, *self.stepped])

    def read(self) -> list[Tensor]:
        """Return the current weights in host memory. Parameters that have main weights are returned
        as main weights.

        No copy may be in progress when this method is called.
        """
        if self._state is None:
            return [p.detach().to("cpu", copy=True) for p in self.stepped]
        flat_N = aligned_buffer(self.layout.nbytes, "cpu")
        self._weights.read(flat_N)
        weights, mains = self.layout.views(flat_N), self._state.mains()
        return [mains.get(id(p), x) for p, x in zip(self.stepped, weights, strict=True)]

    def write(self, weights: Sequence[Tensor]) -> None:
        """Replace the weights and the main weights. Weights that are attached to the module are
        fetched again."""
        if self._state is not None:
            for finish in self._stage_files(weights):
                finish(True)
            return
        if self._coming is not None:  # a copy to the GPU may still read the old weights
            self._coming.synchronize()
        with torch.no_grad():
            for p, x in zip(self.stepped, weights, strict=True):
                p.copy_(x)
        self._follow_mains()

    def _stage_files(self, weights: Sequence[Tensor]) -> list[Callable[[bool], None]]:
        flat_N = aligned_buffer(self.layout.nbytes, "cpu")
        self.layout.fill(flat_N, weights)
        staged = [self._weights.stage(flat_N)]
        try:
            if self.mains:
                staged.append(self._state.stage_mains({id(self.stepped[i]): weights[i]
                                                       for i in self.mains}))
        except BaseException:
            staged[0](False)
            raise
        return staged

    def float_buffers(self) -> list[Tensor]:
        """Return the floating-point buffers of the module, which are always on the device."""
        return [x for x in self.module.buffers() if x.is_floating_point()]

    def saved_buffers(self) -> dict[str, Tensor]:
        """Return the buffers that checkpoints contain, of any dtype."""
        saved = self.module.state_dict(keep_vars=True)
        return {name: x for name, x in self.module.named_buffers() if name in saved}

    def stage(self, weights: Sequence[Tensor], buffers: Sequence[Tensor]
              ) -> Callable[[bool], None]:
        """Store new weights and buffers next to the current weights and buffers.

        Returns: a function that accepts the new values if it is called with True, and drops them if
            it is called with False.
        """
        staged = [] if self._state is None else self._stage_files(weights)

        def finish(taken: bool) -> None:
            for finish_part in staged:
                finish_part(taken)
            if taken and self._state is None:
                self.write(weights)
            if taken:
                with torch.no_grad():
                    for buffer, x in zip(self.float_buffers(), buffers, strict=True):
                        buffer.copy_(x)

        return finish

    def state_tensors(self) -> dict[tuple[int, str], Tensor]:
        """Return the state tensors of the optimizer by parameter and name. No copy may be in
        progress when this method is called.
        """
        return state_of(self.optimizer) if self._state is None else self._state.tensors()

    def load_state(self, state: dict[tuple[int, str], Tensor]) -> None:
        """Replace the state tensors of the optimizer."""
        if self._state is None:
            set_state(self.optimizer, state)
        else:
            self._state.load(state)

    def settle(self) -> None:
        """Wait for writes in progress, and raise an error if a write failed."""
        if self.streams:
            self._weights.settle()
        if self._state is not None:
            self._state.settle()


def drop_gradients(params: Sequence[nn.Parameter]) -> None:
    """Free the memory of the gradients."""
    for p in params:
        p.grad = None
