"""A block with streamed weights, and functions that load, unload and update these weights."""

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
    """A block of a model, with its module, its optimizer and the storage of its weights.

    Args:
        number: index of the block in the model.
        module: module of the block, which is computed on the device.
        make_optimizer: function that creates an optimizer for the block's trained parameters.
        tier: tier that stores the weights, gradients and optimizer state. With a tier in host
            memory, the optimizer runs on the host, and the weights are copied to the device. With a
            tier in files, the weights and the optimizer state are read into memory, updated, and
            written back. Without a tier, all data stays on the device.
        main_weights: if True, the optimizer updates a float32 copy (main weight) of each 16-bit
            parameter. Main weights are stored together with the optimizer state. The weights on the
            device are obtained by rounding the main weights.

    Attributes:
        layout: positions of all weights in a single buffer.
        streams: True if the weights are streamed.
        mains: indices of the parameters that have float32 main weights.
        graded: the parameters that have gradients after the backward pass. In `graded`, parameters
            with main weights are replaced by their main weights.
        stepped: the parameters that the optimizer updates.
        optimizer: the optimizer, or None if the block has no trained parameter.
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
        self._state = StateInFiles(tier, self.optimizer) if isinstance(tier, DiskTier) else None
        if self._state is not None and self.mains:
            self._state.hold_mains({id(self.stepped[i]): x
                                    for i, x in zip(self.mains, values, strict=True)})

    def _with_mains(self, values: Sequence[Tensor]) -> list[nn.Parameter]:
        """Return a list of the parameters, with a new parameter in place of each parameter in
        `mains`. Attributes set by host frameworks are copied to the new parameters.
        """
        parameters = list(self.params)
        for i, x in zip(self.mains, values, strict=True):
            parameters[i] = nn.Parameter(x)
            vars(parameters[i]).update(vars(self.params[i]))
        return parameters

    def _leave_device(self, tier: Tier) -> None:
        self._weights = TierBuffer(tier)
        pinned_for = tier.pinned_for if isinstance(tier, HostTier) else None
        flat_N = aligned_buffer(self.layout.nbytes, "cpu", pinned_for)
        self.layout.fill(flat_N, self.params)
        if isinstance(tier, HostTier):
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
        """Number of bytes copied in one step, except for weights copied to the device.

        With a tier in host memory, `returned_bytes` counts the gradients. With a tier in files,
        `returned_bytes` counts the new weights once and the optimizer state twice, because the
        state is both read and written.
        """
        if self._state is not None:
            return (self.layout.nbytes if self.trained else 0) + 2 * self._state.nbytes
        return sum(self.graded[i].numel() * self.graded[i].element_size()
                   for i in self.trained if self.streams)

    @property
    def main_bytes(self) -> int:
        """Size of all main weights in bytes."""
        return sum(4 * self.params[i].numel() for i in self.mains)

    def forget_memory(self) -> None:
        """Free the memory that the experts keep between calls."""
        for module in self.module.modules():
            if isinstance(module, FFNExperts):
                module.memory.clear()

    def fetch(self, copier: Copier, flat_N: Tensor) -> Ticket:
        """Start copying the weights of a streamed block into a buffer on the device."""
        self._coming = self._weights.fetch(copier, flat_N)
        return self._coming

    def attach(self, flat_N: Tensor) -> None:
        """Let the module use the weights in this buffer."""
        self._weights.settle()  # the fetched weights are those whose write is completed here
        self._flat_N = flat_N
        for p, view in zip(self.params, self.layout.views(flat_N), strict=True):
            p.data = view

    def detach(self) -> None:
        """Detach the module's weights from the buffer, because another block will use the buffer.
        """
        self._flat_N = None
        for p in self.params if self.streams else ():
            p.data = absent(p)

    def fetch_state(self, copier: Copier, room: OptimizerStateBuffer) -> None:
        """Start copying the optimizer state from files to memory."""
        if self._state is not None:
            self._state.fetch(copier, room)

    def step(self, copier: Copier, room: OptimizerStateBuffer, scale: Scale | None = None) -> bool:
        """Run an optimizer step, and free the gradients.

        Args:
            copier: the copier.
            room: buffer that receives the optimizer state.
            scale: function that modifies the gradients in place. If `scale` is passed,
                `keep_gradients` must have been called before. By default, the optimizer uses the
                gradients of the backward pass without changes.
        Returns: True if the weights attached to the module have already been updated.
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
        assert self._flat_N is not None
        self._weights.put_later(copier, self._flat_N)
        self._state.leave(copier, room)

    @torch.no_grad()
    def _follow_mains(self) -> None:
        for i in self.mains:
            self._lower[i].copy_(self.stepped[i])

    def sum_gradients(self) -> None:
        """Add the 16-bit gradients of a backward pass to the float32 gradients of the main weights.
        """
        for i in self.mains:
            p, main = self.params[i], self.graded[i]
            if p.grad is not None and main.grad is not None:
                main.grad.add_(p.grad)
            elif p.grad is not None:
                main.grad = p.grad.float()
            p.grad = None

    def keep_gradients(self, copier: Copier) -> None:
        """Start copying the gradients to the tier.

        The tier stores the gradients until `step` is called. Call `wait_kept` to wait until the
        copy is complete.
        """
        gradients = {i: g for i in self.trained if (g := self.graded[i].grad) is not None}
        if self.tier is None or not gradients:
            return
        held, ticket = self.tier.put_later(copier, list(gradients.values()))
        self._aside = (list(gradients), held, ticket)
        drop_gradients(self.graded)

    def wait_kept(self) -> None:
        """Wait for the copy of `keep_gradients`. Raises `TierError` if the tier has no space."""
        if self._aside is not None:
            _, _, ticket = self._aside
            ticket.synchronize()  # the GPU's stream does not order the optimizer in host memory

    def _take_gradients(self) -> None:
        if self._aside is not None and self.tier is not None:
            owners, held, _ = self._aside
            taken = self.tier.take(held)
            self._aside = None
            for i, gradient in zip(owners, taken, strict=True):
                self.stepped[i].grad = gradient

    def forget_gradients(self) -> None:
        """After an error, discard all gradients, including gradients stored in the tier."""
        if self._aside is not None and self.tier is not None:
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
        """Return the current weights as tensors in host memory. For parameters that have main
        weights, the main weights are returned.

        This method must not be called while a copy is in progress.
        """
        if self._state is None:
            return [p.detach().to("cpu", copy=True) for p in self.stepped]
        flat_N = aligned_buffer(self.layout.nbytes, "cpu")
        self._weights.read(flat_N)
        weights, mains = self.layout.views(flat_N), self._state.mains()
        return [mains.get(id(p), x) for p, x in zip(self.stepped, weights, strict=True)]

    def write(self, weights: Sequence[Tensor]) -> None:
        """Replace the weights, including the main weights. The weights attached to the module are
        also updated on the device.
        """
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
            if self.mains and self._state is not None:
                staged.append(self._state.stage_mains({id(self.stepped[i]): weights[i]
                                                       for i in self.mains}))
        except BaseException:
            staged[0](False)
            raise
        return staged

    def float_buffers(self) -> list[Tensor]:
        """Return the module's floating-point buffers, which always stay on the device."""
        return [x for x in self.module.buffers() if x.is_floating_point()]

    def saved_buffers(self) -> dict[str, Tensor]:
        """Return the buffers, of any dtype, that are saved in checkpoints."""
        saved = self.module.state_dict(keep_vars=True)
        return {name: x for name, x in self.module.named_buffers() if name in saved}

    def stage(self, weights: Sequence[Tensor], buffers: Sequence[Tensor]
              ) -> Callable[[bool], None]:
        """Store new weights and buffers in addition to the current weights and buffers.

        Returns: A function. Call the returned function with True to use the new weights and
            buffers, or with False to discard them.
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
        """Return the tensors of the optimizer state. The keys of the returned dict are pairs of a
        parameter's index and the name of the state. This method must not be called while a copy is
        in progress.
        """
        return state_of(self.optimizer) if self._state is None else self._state.tensors()

    def load_state(self, state: dict[tuple[int, str], Tensor]) -> None:
        """Replace the tensors of the optimizer state."""
        if self._state is None:
            set_state(self.optimizer, state)
        else:
            self._state.load(state)

    def settle(self) -> None:
        """Wait until all writes are complete, and raise an error if a write failed."""
        if self.streams:
            self._weights.settle()
        if self._state is not None:
            self._state.settle()


def drop_gradients(params: Sequence[nn.Parameter]) -> None:
    """Free the memory of the gradients of the given parameters."""
    for p in params:
        p.grad = None
