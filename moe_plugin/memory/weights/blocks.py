"""One block of a model whose weights live in a slower tier: how they come, go and are stepped."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from moe_plugin.experts.ffn import FFNExperts
from moe_plugin.memory.copier import Copier, Ticket
from moe_plugin.memory.flat import FlatLayout, absent, aligned_buffer
from moe_plugin.memory.tiers import HostTier, TierTensor

MakeOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
Scale = Callable[[list[Tensor]], object]


class StreamedBlock(ABC):
    """A block's module, its optimizer, and where its weights are.

    Args:
        number: of the block in its model. module: on the device. make_optimizer: of the parameters
            that train.

    Attributes:
        layout: of its weights in one buffer. streams: whether its weights come and go; False: they
            stay on the device.
        optimizer: None where nothing trains.
    Raises:
        ValueError: a parameter is not contiguous.
    """

    streams = True

    def __init__(self, number: int, module: nn.Module, make_optimizer: MakeOptimizer) -> None:
        self.number, self.module = number, module
        self.names = [name for name, _ in module.named_parameters()]
        self.params = list(module.parameters())
        for name, p in zip(self.names, self.params, strict=True):
            if not p.is_contiguous():
                raise ValueError(f"block {number}: parameter {name} is not contiguous and would "
                                 "come back in another order; make it contiguous()")
        self.layout = FlatLayout.of(self.params)
        self.trained = [i for i, p in enumerate(self.params) if p.requires_grad]
        self.make_optimizer = make_optimizer
        self.optimizer: torch.optim.Optimizer | None = None

    def _optimize(self, params: Sequence[nn.Parameter]) -> None:
        if self.trained:
            self.optimizer = self.make_optimizer([params[i] for i in self.trained])

    @property
    def returned_bytes(self) -> int:
        """Copied in a step besides the weights that come in."""
        return 0

    @property
    def gradients(self) -> list[Tensor | None]:
        """Of the parameters that train, as backward left them."""
        return [self.params[i].grad for i in self.trained]

    def forget_memory(self) -> None:
        """Give back what the experts keep between two calls, which are a whole step apart here."""
        for module in self.module.modules():
            if isinstance(module, FFNExperts):
                module.memory.clear()

    def fetch(self, copier: Copier, flat_N: Tensor) -> Ticket | None:
        """Start to copy the weights into a buffer of the device."""
        return None

    def attach(self, flat_N: Tensor | None) -> None:
        """Compute with the weights in this buffer from now on."""
        if flat_N is not None:
            for p, view in zip(self.params, self.layout.views(flat_N), strict=True):
                p.data = view

    def detach(self) -> None:
        """The buffer is given to another block."""
        if self.streams:
            for p in self.params:
                p.data = absent(p)

    def fetch_state(self, copier: Copier, room: OptimizerStateBuffer) -> None:
        """Start to copy the optimizer's state to where it steps, where it is elsewhere."""

    @abstractmethod
    def step(self, copier: Copier, room: OptimizerStateBuffer, scale: Scale | None = None) -> bool:
        """Step the optimizer with the gradients and drop them. Returns whether the attached weights
        are the new ones.

        scale: changes gradients in place, which `keep_gradients` has put aside; None: they are
        where backward left them.
        """

    def keep_gradients(self, copier: Copier) -> None:
        """Start to put the gradients aside until `step`; `wait_kept` waits for it."""

    def wait_kept(self) -> None:
        """Wait until what `keep_gradients` started is done. `TierError`: there is no room."""

    def forget_gradients(self) -> None:
        """After an error: drop all gradients, those that were put aside, too."""
        drop_gradients(self.params)

    @abstractmethod
    def read(self) -> list[Tensor]:
        """The weights now, in host memory; nothing is in flight."""

    @abstractmethod
    def write(self, weights: Sequence[Tensor]) -> None:
        """Replace the weights; nothing is in flight, and what is attached is fetched again."""

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
        write = self._staged(weights)

        def finish(taken: bool) -> None:
            write(taken)
            if taken:
                with torch.no_grad():
                    for buffer, x in zip(self.float_buffers(), buffers, strict=True):
                        buffer.copy_(x)

        return finish

    def _staged(self, weights: Sequence[Tensor]) -> Callable[[bool], None]:
        return lambda taken: self.write(weights) if taken else None

    def state_tensors(self) -> dict[tuple[int, str], Tensor]:
        """The optimizer's tensors by parameter and name; nothing is in flight."""
        return state_of(self.optimizer)

    def load_state(self, state: dict[tuple[int, str], Tensor]) -> None:
        """Take such tensors."""
        set_state(self.optimizer, state)

    def settle(self) -> None:
        """Wait for what is being written; raise what went wrong."""


class OptimizerStateBuffer:
    """Host memory for the optimizer's state of one block at a time; it grows to the largest."""

    def __init__(self) -> None:
        self._flat_N = aligned_buffer(0, "cpu")
        self._last: Ticket | None = None

    def of(self, nbytes: int) -> Tensor:
        """A buffer [nbytes]; jobs that still use the one before it keep it."""
        if self._flat_N.numel() < nbytes:
            self._flat_N = aligned_buffer(nbytes, "cpu")
        return self._flat_N[:nbytes]

    def left(self, ticket: Ticket) -> None:
        """A job reads the room: the next one that the copier starts may overwrite it."""
        self._last = ticket

    def wait(self) -> None:
        """Until the caller itself may overwrite the room."""
        if self._last is not None:
            self._last.wait()
        self._last = None

    @property
    def nbytes(self) -> int:
        """Size so far."""
        return self._flat_N.numel()


class ResidentBlock(StreamedBlock):
    """A block that stays on the device, its optimizer's state too."""

    streams = False

    def __init__(self, number: int, module: nn.Module, make_optimizer: MakeOptimizer) -> None:
        super().__init__(number, module, make_optimizer)
        self._optimize(self.params)

    def step(self, copier: Copier, room: OptimizerStateBuffer, scale: Scale | None = None) -> bool:
        scale_gradients(self.params, scale)
        if self.optimizer is not None:
            self.optimizer.step()
        drop_gradients(self.params)
        return True

    def read(self) -> list[Tensor]:
        return [p.detach().to("cpu", copy=True) for p in self.params]

    def write(self, weights: Sequence[Tensor]) -> None:
        with torch.no_grad():
            for p, x in zip(self.params, weights, strict=True):
                p.copy_(x)


class HostBlock(StreamedBlock):
    """Weights, gradients and state in host memory, where the optimizer steps; the device has a copy
    of the weights.
    """

    def __init__(self, number: int, module: nn.Module, make_optimizer: MakeOptimizer,
                 tier: HostTier) -> None:
        super().__init__(number, module, make_optimizer)
        flat_N = aligned_buffer(self.layout.nbytes, "cpu", tier.pinned)
        self.layout.fill(flat_N, self.params)
        self.held = TierTensor(tuple(flat_N.shape), flat_N.dtype, flat_N)
        self.tier = tier
        self.masters = [nn.Parameter(view, p.requires_grad) for view, p in
                        zip(self.layout.views(flat_N), self.params, strict=True)]
        self._leaving: Ticket | None = None  # gradients on their way to host memory
        self._optimize(self.masters)
        self.detach()

    @property
    def returned_bytes(self) -> int:
        """See `StreamedBlock`: gradients."""
        return sum(self.params[i].numel() * self.params[i].element_size() for i in self.trained)

    def fetch(self, copier: Copier, flat_N: Tensor) -> Ticket:
        return self.tier.fetch(copier, [(flat_N, self.held)])

    def keep_gradients(self, copier: Copier) -> None:
        pairs = []
        for i in self.trained:
            p, master = self.params[i], self.masters[i]
            if p.grad is not None:
                master.grad = torch.empty(p.shape, dtype=p.dtype, pin_memory=self.tier.pinned)
                pairs.append((master.grad, p.grad))
        drop_gradients(self.params)
        self._leaving = copier.start(pairs) if pairs else None

    def wait_kept(self) -> None:
        if self._leaving is not None:
            self._leaving.wait()
            if self.tier.pinned:  # the optimizer is no work of the GPU's stream
                torch.cuda.current_stream(self._leaving.device).synchronize()
        self._leaving = None

    def step(self, copier: Copier, room: OptimizerStateBuffer, scale: Scale | None = None) -> bool:
        if scale is None:
            self.keep_gradients(copier)
        self.wait_kept()
        scale_gradients(self.masters, scale)
        if self.optimizer is not None:
            self.optimizer.step()
        drop_gradients(self.masters)
        return False

    def forget_gradients(self) -> None:
        self._leaving = None
        drop_gradients([*self.params, *self.masters])

    def read(self) -> list[Tensor]:
        return [master.detach().clone() for master in self.masters]

    def write(self, weights: Sequence[Tensor]) -> None:
        self.layout.fill(self.held.tensor, weights)


def params_of(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    """An optimizer's parameters in its order."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def state_of(optimizer: torch.optim.Optimizer | None, numbers: bool = False
             ) -> dict[tuple[int, str], Tensor]:
    """Tensors of its state by number of the parameter and name.

    numbers: the single numbers among them, such as counts of steps; else all others.
    """
    if optimizer is None:
        return {}
    return {(i, name): x for i, p in enumerate(params_of(optimizer))
            for name, x in optimizer.state.get(p, {}).items()
            if isinstance(x, Tensor) and (x.dim() == 0) == numbers}


def set_state(optimizer: torch.optim.Optimizer | None, state: dict[tuple[int, str], Tensor]
              ) -> None:
    """Replace such tensors, see `state_of`."""
    if optimizer is not None:
        params = params_of(optimizer)
        for (i, name), x in state.items():
            optimizer.state[params[i]][name] = x


def scale_gradients(params: Sequence[nn.Parameter], scale: Scale | None) -> None:
    """Change the gradients in place; None: leave them."""
    if scale is not None:
        scale([p.grad for p in params if p.grad is not None])


def drop_gradients(params: Sequence[nn.Parameter]) -> None:
    """Give the gradients' memory back."""
    for p in params:
        p.grad = None
