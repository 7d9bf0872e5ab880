"""A processor that computes wrongly is found: every n steps, ranks that store the same parameters
compute the same micro-batch and compare all they computed, bit by bit.

Such twins are the ranks at the same place of their expert-parallel groups; without experts, or with
groups of one, all data-parallel ranks. What each module puts out, the gradients that arrive there
and those of the parameters are checksums in the order in which they are computed. Exchanges carry
a wrong number to other ranks, so it is the first difference that counts: it is at the rank that
made it. Of three twins the one is named that differs from the others; of two, both.
"""

from __future__ import annotations

import io
import socket
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from moe_plugin.checkpoint.trust import torch_load
from moe_plugin.comm import Comm, LocalComm, default_comm
from moe_plugin.experts import Experts
from moe_plugin.layer import MoELayer, layers_in
from moe_plugin.memory.activations.offload import tensors
from moe_plugin.records import ExpertRows
from moe_plugin.training.gradients.replicas import replica_comm
from moe_plugin.training.resilience.overflow import StepStart
from moe_plugin.utils.run_feature import RunFeature, StepInput

_HOST_BYTES = 64


@dataclass(eq=False)
class WrongResultError(RuntimeError):
    """Ranks computed something else than their twins; raised on all ranks.

    Attributes:
        step: of the check.
        ranks: of the world, one or, where twins cannot be told apart, several.
        hosts: their names.
        where: what they computed when they differed first.
    """

    step: int
    ranks: tuple[int, ...]
    hosts: tuple[str, ...]
    where: str

    def __str__(self) -> str:
        named = ", ".join(f"rank {rank} on {host}"
                          for rank, host in zip(self.ranks, self.hosts, strict=True))
        one = len(self.ranks) == 1
        remedy = ("take this machine out of the run" if one else
                  "one of them is wrong: check these machines")
        return (f"step {self.step}: {named} computed {self.where} otherwise than ranks with the "
                f"same parameters and micro-batch; {remedy}, and go on from a checkpoint that was "
                "written before the last check without an error")


class TwinCheck(RunFeature):
    """See the module. Off unless one is made:

        check = TwinCheck(model, every=1000)
        for step, batch in enumerate(batches, 1):
            if check.due(step):
                check(step, batch, lambda batch: loss_of(model, batch))
            ...

    The training step itself is not touched: no gradient, buffer or random number changes. It costs
    one forward and backward pass each `every` steps.

    Args:
        model: not compiled; without reentrant checkpointing, which knows no `autograd.grad`.
            Collective.
        world: all data-parallel ranks; None: those of the default group.
        every: steps from one check to the next.
        start: what keeps the state that the check must not change, made with the models.
        kept: around a check in the steps of a run: what passes change in the host is as before.
    Raises:
        ValueError: `every` < 1, or this rank has no twin.
    """

    def __init__(self, model: nn.Module, world: Comm | None = None, *, every: int,
                 start: Callable[[list[nn.Module]], StepStart] = StepStart,
                 kept: Callable[[], AbstractContextManager[Any]] = nullcontext) -> None:
        self.model, self.every, self.start, self.kept = model, every, start, kept
        self.world = default_comm() if world is None else world
        self.layers = layers_in(model)
        experts = self.layers[0].comm if self.layers else LocalComm()
        if every < 1:
            raise ValueError(f"every={every} must be >= 1 step; make no check to have none")
        twins = replica_comm(experts, self.world)
        if twins is None:
            raise ValueError(
                f"no two of {self.world.size} ranks store the same experts (expert-parallel groups "
                f"of {experts.size}), so none can check another: use groups of at most half the "
                "ranks (--moe-expert-parallel-size), or no check")
        self.twins = twins
        place = torch.tensor([[experts.rank]], device=self.world.device)
        self._places = self.world.all_gather(place).flatten().tolist()

    def due(self, step: int) -> bool:
        """Whether the check is to run before this step (from 1)."""
        return step % self.every == 0

    def around_step(self, step: StepInput) -> AbstractContextManager[None]:
        """Check before the step, if it is due. Raises `WrongResultError` on all ranks."""
        assert step.batch is not None and step.loss_of is not None
        if self.due(step.number):
            with self.kept():
                self(step.number, step.batch(), step.loss_of)
        return nullcontext()

    def __call__(self, step: int, batch: Any, loss_of: Callable[[Any], Tensor]) -> None:
        """Compute one of the twins' micro-batches on all of them and compare. Collective.

        Args:
            step: the same on all ranks; twins take turns by it.
            batch: this rank's micro-batch: tensors in any containers that can be pickled.
            loss_of: of a batch; the model's forward pass.
        Raises:
            WrongResultError: on all ranks.
        """
        batch = self._shared(batch, (step // self.every) % self.twins.size)
        start = self.start([self.model])
        torch.manual_seed(step)
        try:
            with alike(self.layers), _Recorder(self.model) as seen:
                seen.gradients(loss_of(batch))
        finally:
            start.restore()
        self._compare(step, seen)

    def _shared(self, batch: Any, root: int) -> Any:
        """The batch of one of the twins."""
        payload = io.BytesIO()
        if self.twins.rank == root:
            torch.save(batch, payload)
        device = self.twins.device
        length = torch.tensor([payload.tell()], dtype=torch.int64, device=device)
        count = int(self.twins.broadcast(length, root))
        bytes_N = torch.zeros(count, dtype=torch.uint8, device=device)
        if self.twins.rank == root:
            bytes_N = torch.frombuffer(payload.getbuffer(), dtype=torch.uint8).to(device)
        got = self.twins.broadcast(bytes_N, root)
        if self.twins.rank == root:
            return batch
        # from a rank of this job, not from a file; a tensor of a card comes to this rank's
        return torch_load(io.BytesIO(got.cpu().numpy().tobytes()), weights_only=False,
                          map_location=lambda storage, place: storage if place == "cpu" else
                          storage.to(device=device))

    def _compare(self, step: int, seen: _Recorder) -> None:
        sums = torch.stack(seen.sums).to(self.world.device)
        most = int(self.world.agree_max([len(sums)])[0])
        padded = sums.new_zeros(most, 2)
        padded[:len(sums)] = sums
        every_WN2 = self.world.all_gather(padded.view(1, -1)).view(self.world.size, most, 2).cpu()
        if all(torch.equal(rows, every_WN2[self._places.index(place)])
               for rows, place in zip(every_WN2, self._places, strict=True)):
            return
        at, ranks = _first_difference(every_WN2.tolist(), self._places)
        hosts = self._hosts()
        where = seen.names[at] if at < len(seen.names) else "more than the others"
        raise WrongResultError(step, tuple(ranks), tuple(hosts[r] for r in ranks), where)

    def _hosts(self) -> list[str]:
        name = socket.gethostname().encode()[:_HOST_BYTES].ljust(_HOST_BYTES)
        mine = torch.frombuffer(bytearray(name), dtype=torch.uint8).to(self.world.device)
        names = self.world.all_gather(mine).view(self.world.size, -1).cpu().tolist()
        return [bytes(each).decode(errors="replace").strip() for each in names]


def _first_difference(sums: Sequence[Sequence[Any]],
                      places: Sequence[int]) -> tuple[int, list[int]]:
    """Where ranks at the same place differ first, and which of them differ from most; all of them
    where no value has a majority.
    """
    for at in range(len(sums[0])):
        wrong: list[int] = []
        for place in sorted(set(places)):
            ranks = [rank for rank, other in enumerate(places) if other == place]
            values = [tuple(sums[rank][at]) for rank in ranks]
            value, votes = Counter(values).most_common(1)[0]
            if votes < len(ranks):
                undecided = 2 * votes <= len(ranks)
                wrong += [rank for rank, other in zip(ranks, values, strict=True)
                          if other != value or undecided]
        if wrong:
            return at, sorted(wrong)
    raise AssertionError("called without a difference")


@contextmanager
def alike(layers: Sequence[MoELayer]) -> Iterator[None]:
    """Layers compute in their fixed layout, by rule instead of by measured times: the same bits on
    twins.
    """
    before = torch.are_deterministic_algorithms_enabled()
    only = torch.is_deterministic_algorithms_warn_only_enabled()
    with ExitStack() as stack:
        stack.callback(torch.use_deterministic_algorithms, before, warn_only=only)
        torch.use_deterministic_algorithms(True, warn_only=only or not before)
        for layer in layers:
            stack.enter_context(layer.routed_experts.with_fixed_layout())
        yield


class _Recorder:
    """Checksums of what a model computes, in order. sums: int64 [2] each; names: what it was."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.sums, self.names = model, [], []
        self._hooks = ExitStack()

    def __enter__(self) -> _Recorder:
        for name, module in self.model.named_modules():
            if isinstance(module, Experts) or next(module.children(), None) is None:
                self._hooks.callback(module.register_forward_hook(self._after(name)).remove)
            if isinstance(module, Experts):
                self._hooks.callback(module.register_forward_pre_hook(self._before(name)).remove)
        return self

    def __exit__(self, *error: object) -> None:
        self._hooks.close()

    def gradients(self, loss: Tensor) -> None:
        """Record the loss and the gradients of all parameters, which stay as they are."""
        self.add("the loss", loss)
        named = [(name, p) for name, p in self.model.named_parameters() if p.requires_grad]
        found = torch.autograd.grad(loss, [p for _, p in named], allow_unused=True)
        for (name, _), gradient in zip(named, found, strict=True):
            if gradient is not None:
                self.add(f"the gradient of {name!r}", gradient)

    def add(self, name: str, x: Tensor) -> None:
        self.names.append(name)
        self.sums.append(checksum(x))

    def _before(self, name: str) -> Callable[..., None]:
        """Experts: rows come from other ranks, and so their gradients go there."""
        def hook(module: nn.Module, args: tuple[ExpertRows]) -> None:
            self._backward(f"the gradient of rows of {name!r}", args[0].x)

        return hook

    def _after(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            for x in tensors(output):
                self.add(f"the output of {name!r}", x)
                self._backward(f"the gradient at the output of {name!r}", x)

        return hook

    def _backward(self, name: str, x: Tensor) -> None:
        if x.requires_grad:
            x.register_hook(lambda gradient: self.add(name, gradient))


@torch.no_grad()
def checksum(x: Tensor) -> Tensor:
    """Two sums of a tensor's bits, int64 [2] on its device; any single changed bit changes the
    first, and elements that change places change the second.
    """
    bytes_N = x.detach().contiguous().view(-1).view(torch.uint8)
    words_N = torch.nn.functional.pad(bytes_N, (0, -len(bytes_N) % 8)).view(torch.int64)
    # odd factors: products modulo 2^64 lose nothing
    factors_N = torch.arange(len(words_N), device=x.device, dtype=torch.int64) * 2 + 1
    return torch.stack([words_N.sum(), (words_N * (factors_N * 0x9E3779B97F4A7C1)).sum()])
