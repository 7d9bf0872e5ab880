"""One block of a model whose weights live in a slower tier: how they come, go and are stepped."""

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
    """A block's module, its optimizer, and where its weights are.

    Args:
        number: of the block in its model.
        module: on the device.
        make_optimizer: of the parameters that train.
        tier: where weights, gradients and state are. In host memory the optimizer steps there, and
            the device has a copy of the weights. From files weights and state come to memory, are
            stepped there, and are written again. None: all stay on the device.
        main_weights: the optimizer steps a float32 copy of each parameter of 16 bits, the main
            weight, which lies with the optimizer's state; the device gets its rounded values.

    Attributes:
        layout: of its weights in one buffer.
        streams: whether its weights come and go.
        mains: numbers of the parameters that have a main weight.
        graded: the parameters that have the gradients after backward: those of the module, and for
            each main weight one of float32.
        stepped: the parameters that the optimizer has.
        optimizer: None where nothing trains.
    Raises:
        ValueError: a parameter is not contiguous.
    """

    def __init__(self, number: int, module: nn.Module, make_optimizer: MakeOptimizer,
                 tier: Tier | None, main_weights: bool = False) -> None:
        self.number, self.module, self.tier = number, module, tier
        self.names = [name for name, _ in module.named_parameters()]
        self.params = list(module.parameters())
        for name, p in zip(self.names, self.params, strict=True):
            if not p.is_contiguous():
                raise ValueError(f"block {number}: parameter {name} is not contiguous and would "
                                 "come back in another order; make it contiguous()")
        self.layout = FlatLayout.of(self.params)
        self.trained = [i for i, p in enumerate(self.params) if p.requires_grad]
        self.mains = [i for i in self.trained if main_weights and self.params[i].dtype in HALVES]
        self.streams = tier is not None
        in_files = isinstance(tier, DiskTier)
        values = [self.params[i].detach().float() for i in self.mains]
        self.graded = self.stepped = self._with_mains(
            [absent(x) for x in values] if self.streams else values)
        self._lower: Sequence[Tensor] = self.params  # which follow the main weights
        self._flat_N: Tensor | None = None  # of the device, with the attached weights
        self._coming: Ticket | None = None  # the latest fetch of the weights
        # gradients that wait for the step: of which parameters, where, and the copy
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
        """The parameters, with one of these values for each of `mains`; hosts' marks stay."""
        found = list(self.params)
        for i, x in zip(self.mains, values, strict=True):
            found[i] = nn.Parameter(x)
            vars(found[i]).update(vars(self.params[i]))
        return found

    def _leave_device(self, tier: Tier) -> None:
        self._weights = TierBuffer(tier)
        in_host = isinstance(tier, HostTier)
        flat_N = aligned_buffer(self.layout.nbytes, "cpu", tier.pinned_for if in_host else None)
        self.layout.fill(flat_N, self.params)
        if in_host:
            self._weights.held = TierTensor(tuple(flat_N.shape), flat_N.dtype, flat_N)
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
        """Copied in a step besides the weights that come in: gradients, or the new weights and the
        state, which comes and goes.
        """
        if self._state is not None:
            return (self.layout.nbytes if self.trained else 0) + 2 * self._state.nbytes
        return sum(self.graded[i].numel() * self.graded[i].element_size()
                   for i in self.trained if self.streams)

    @property
    def main_bytes(self) -> int:
        """Of the main weights."""
        return sum(4 * self.params[i].numel() for i in self.mains)

    def forget_memory(self) -> None:
        """Give back what the experts keep between two calls, which are a whole step apart here."""
        for module in self.module.modules():
            if isinstance(module, FFNExperts):
                module.memory.clear()

    def fetch(self, copier: Copier, flat_N: Tensor) -> Ticket:
        """Start to copy the weights into a buffer of the device; of a block that streams."""
        self._coming = self._weights.fetch(copier, flat_N)
        return self._coming

    def attach(self, flat_N: Tensor) -> None:
        """Compute with the weights in this buffer from now on."""
        self._weights.settle()  # what was read is what was to be written before
        self._flat_N = flat_N
        for p, view in zip(self.params, self.layout.views(flat_N), strict=True):
            p.data = view

    def detach(self) -> None:
        """The buffer is given to another block."""
        self._flat_N = None
        for p in self.params if self.streams else ():
            p.data = absent(p)

    def fetch_state(self, copier: Copier, room: OptimizerStateBuffer) -> None:
        """Start to copy the optimizer's state to where it steps, where it is elsewhere."""
        if self._state is not None:
            self._state.fetch(copier, room)

    def step(self, copier: Copier, room: OptimizerStateBuffer, scale: Scale | None = None) -> bool:
        """Step the optimizer with the gradients and drop them. Returns whether the attached weights
        are the new ones.

        scale: changes gradients in place, which `keep_gradients` has put aside; None: they are
        where backward left them.
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
        """Add the gradients of 16 bits that backward has left to those of the main weights."""
        for i in self.mains:
            p, main = self.params[i], self.graded[i]
            if p.grad is not None and main.grad is not None:
                main.grad.add_(p.grad)
            elif p.grad is not None:
                main.grad = p.grad.float()
            p.grad = None

    def keep_gradients(self, copier: Copier) -> None:
        """Start to put the gradients into the tier until `step`; `wait_kept` waits for it."""
        owners = [i for i in self.trained if self.graded[i].grad is not None]
        if self.tier is None or not owners:
            return
        held, ticket = self.tier.put_later(copier, [self.graded[i].grad for i in owners])
        self._aside = (owners, held, ticket)
        drop_gradients(self.graded)

    def wait_kept(self) -> None:
        """Wait until what `keep_gradients` started is done. `TierError`: there is no room."""
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
        """After an error: drop all gradients, those that were put aside, too."""
        if self._aside is not None:
            _, held, ticket = self._aside
            self._aside = None
            try:
                ticket.wait()
            except Exception:  # noqa: BLE001 - the step's own error is raised, for all blocks
                held = []  # after `TierError` the room is back, after another who has it is unknown
            for one in held:
                self.tier.free(one)
        drop_gradients([*self.params, *self.graded, *self.stepped])

    def read(self) -> list[Tensor]:
        """The weights now, main ones where there are, in host memory; nothing is in flight."""
        if self._state is None:
            return [p.detach().to("cpu", copy=True) for p in self.stepped]
        flat_N = aligned_buffer(self.layout.nbytes, "cpu")
        self._weights.read(flat_N)
        weights, mains = self.layout.views(flat_N), self._state.mains()
        return [mains.get(id(p), x) for p, x in zip(self.stepped, weights, strict=True)]

    def write(self, weights: Sequence[Tensor]) -> None:
        """Replace the weights, main ones, too; what is attached is fetched again."""
        if self._state is not None:
            for finish in self._stage_files(weights):
                finish(True)
            return
        if self._coming is not None:  # a copy to the GPU may still read what is replaced
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
        """The module's buffers of floating-point numbers, which are always on the device."""
        return [x for x in self.module.buffers() if x.is_floating_point()]

    def saved_buffers(self) -> dict[str, Tensor]:
        """Those that checkpoints have, of any dtype."""
        saved = self.module.state_dict(keep_vars=True)
        return {name: x for name, x in self.module.named_buffers() if name in saved}

    def stage(self, weights: Sequence[Tensor], buffers: Sequence[Tensor]
              ) -> Callable[[bool], None]:
        """Hold new weights and buffers next to the present ones; what is returned takes them
        (True) or drops them.
        """
        staged = [] if self._state is None else self._stage_files(weights)

        def finish(taken: bool) -> None:
            for each in staged:
                each(taken)
            if taken and self._state is None:
                self.write(weights)
            if taken:
                with torch.no_grad():
                    for buffer, x in zip(self.float_buffers(), buffers, strict=True):
                        buffer.copy_(x)

        return finish

    def state_tensors(self) -> dict[tuple[int, str], Tensor]:
        """The optimizer's tensors by parameter and name; nothing is in flight."""
        return state_of(self.optimizer) if self._state is None else self._state.tensors()

    def load_state(self, state: dict[tuple[int, str], Tensor]) -> None:
        """Take such tensors."""
        if self._state is None:
            set_state(self.optimizer, state)
        else:
            self._state.load(state)

    def settle(self) -> None:
        """Wait for what is being written; raise what went wrong."""
        if self.streams:
            self._weights.settle()
        if self._state is not None:
            self._state.settle()


def drop_gradients(params: Sequence[nn.Parameter]) -> None:
    """Give the gradients' memory back."""
    for p in params:
        p.grad = None
