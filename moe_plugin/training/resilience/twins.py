"""Detect processors that compute wrong results.

Every n steps, ranks that store the same parameters compute the same micro-batch. All results of
these ranks are compared bit by bit. Ranks that store the same parameters are called twins. Twins
are the ranks that have the same index in their expert-parallel groups. If the model has no experts,
or if each expert-parallel group has one rank, all data-parallel ranks are twins.

The compared values are checksums of each module's output, of the gradient of each output, and of
the gradients of the parameters. The checksums are compared in the order in which they were
computed. If a rank computes a wrong value, all-to-alls and other exchanges propagate it to other
ranks. Only the first difference is therefore evaluated, because it occurs on the rank that caused
it. With three or more twins, the twin that differs from the majority is reported. With only two
twins, both twins are reported.
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
from moe_plugin.training.resilience.skipped_steps import StepStart
from moe_plugin.utils.run_feature import RunFeature, StepInput

_HOST_BYTES = 64


@dataclass(eq=False)
class WrongResultError(RuntimeError):
    """Raised on all ranks if the results of some ranks differ from those of their twins.

    Attributes:
        step: step in which the check failed.
        ranks: global ranks whose results differ, or all candidates if the faulty twin cannot be
            determined.
        hosts: host names of the ranks in `ranks`.
        where: description of the first value that differs.
    """

    step: int
    ranks: tuple[int, ...]
    hosts: tuple[str, ...]
    where: str

    def __str__(self) -> str:
        named = ", ".join(f"rank {rank} on {host}"
                          for rank, host in zip(self.ranks, self.hosts, strict=True))
        single = len(self.ranks) == 1
        remedy = ("take this machine out of the run" if single else
                  "one of them is wrong, so check these machines")
        return (f"step {self.step}: {named} computed a different value for {self.where} than "
                f"ranks with the same parameters and micro-batch; {remedy}, and resume from a "
                "checkpoint written before the last check without an error")


class TwinCheck(RunFeature):
    """A check that compares the results of twins; see the docstring of this module.

    Nothing is checked unless a `TwinCheck` is created:

        check = TwinCheck(model, every=1000)
        for step, batch in enumerate(batches, 1):
            if check.due(step):
                check(step, batch, lambda batch: loss_of(model, batch))
            ...

    The check does not affect the training step: it changes no gradient, no buffer and no random
    state. Each check runs one forward pass and one backward pass. A check runs every `every` steps.

    Args:
        model: the model. The model must not be compiled, and it must not use reentrant
            checkpointing, which `autograd.grad` does not support. Collective.
        world: optional. All data-parallel ranks. Defaults to the ranks of the default process
            group.
        every: number of steps from one check to the next.
        start: function that is called with a list of models, and returns a snapshot of the state
            that the check must not change.
        kept: context manager that is active during a check in training. `kept` restores the state
            of the host framework that forward and backward passes change.
    Raises:
        ValueError: If `every` is less than 1, or if this rank has no twin.
    """

    def __init__(self, model: nn.Module, world: Comm | None = None, *, every: int,
                 start: Callable[[list[nn.Module]], StepStart] = StepStart,
                 kept: Callable[[], AbstractContextManager[Any]] = nullcontext) -> None:
        self.model, self.every, self.start, self.kept = model, every, start, kept
        self.world = default_comm() if world is None else world
        self.layers = layers_in(model)
        experts = self.layers[0].comm if self.layers else LocalComm()
        if every < 1:
            raise ValueError(f"every={every} is out of bounds: the number of steps between two "
                             "checks must be >= 1; omit the check to disable it")
        twins = replica_comm(experts, self.world)
        if twins is None:
            raise ValueError(
                f"no two of {self.world.size} ranks store the same experts (expert-parallel groups "
                f"have {experts.size} ranks), so ranks cannot check each other. Use groups of at "
                "most half the ranks (fairseq: --moe-expert-parallel-size, Megatron: "
                "--expert-model-parallel-size), or disable the check")
        self.twins = twins
        place = torch.tensor([[experts.rank]], device=self.world.device)
        self._places = self.world.all_gather(place).flatten().tolist()

    def due(self, step: int) -> bool:
        """Return true if a check runs before this step. Steps are counted from 1."""
        return step % self.every == 0

    def around_step(self, step: StepInput) -> AbstractContextManager[None]:
        """Run a check if it is due. If results differ, all ranks raise `WrongResultError`."""
        assert step.batch is not None and step.loss_of is not None
        if self.due(step.number):
            with self.kept():
                self(step.number, step.batch(), step.loss_of)
        return nullcontext()

    def __call__(self, step: int, batch: Any, loss_of: Callable[[Any], Tensor]) -> None:
        """Compute one micro-batch on all twins, and compare their results. Collective.

        Args:
            step: index of the step. The index must be the same on all ranks, and determines whose
                micro-batch all twins compute.
            batch: micro-batch of this rank. The batch may consist of tensors in any containers that
                can be pickled.
            loss_of: function that runs the forward pass of the model on a batch and returns the
                loss.
        Raises:
            WrongResultError: If results differ. Raised on all ranks.
        """
        batch = self._shared(batch, (step // self.every) % self.twins.size)
        start = self.start([self.model])
        torch.manual_seed(step)
        try:
            with deterministic_layers(self.layers), _Recorder(self.model) as seen:
                seen.gradients(loss_of(batch))
        finally:
            start.restore()
        self._compare(step, seen)

    def _shared(self, batch: Any, root: int) -> Any:
        """Send the micro-batch of the twin `root` to all twins, and return it."""
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
        # The data comes from a rank of this job, not from a file, so pickle is safe. Tensors on a
        # GPU are loaded to this rank's GPU.
        def to_own(storage: Any, place: str) -> Any:
            return storage if place == "cpu" else storage.to(device=device)

        return torch_load(io.BytesIO(got.cpu().numpy().tobytes()), weights_only=False,
                          map_location=to_own)

    def _compare(self, step: int, seen: _Recorder) -> None:
        sums = torch.stack(seen.sums).to(self.world.device)
        most = int(self.world.agree_max([len(sums)])[0])
        padded = sums.new_zeros(most, 2)
        padded[:len(sums)] = sums
        every_WN2 = self.world.all_gather(padded.view(1, -1)).view(self.world.size, most, 2).cpu()
        if all(torch.equal(rows, every_WN2[self._places.index(position)])
               for rows, position in zip(every_WN2, self._places, strict=True)):
            return
        at, ranks = _first_difference(every_WN2.tolist(), self._places)
        hosts = self._hosts()
        where = seen.names[at] if at < len(seen.names) else "additional values"
        raise WrongResultError(step, tuple(ranks), tuple(hosts[r] for r in ranks), where)

    def _hosts(self) -> list[str]:
        name = socket.gethostname().encode()[:_HOST_BYTES].ljust(_HOST_BYTES)
        name_bytes = torch.frombuffer(bytearray(name), dtype=torch.uint8).to(self.world.device)
        names = self.world.all_gather(name_bytes).view(self.world.size, -1).cpu().tolist()
        return [bytes(encoded).decode(errors="replace").strip() for encoded in names]


def _first_difference(sums: Sequence[Sequence[Any]],
                      places: Sequence[int]) -> tuple[int, list[int]]:
    """Return the index of the first value that differs between twins, and the ranks whose value is
    wrong.

    A rank's value is wrong if it differs from the majority of the rank's twins. If there is no
    majority, all twins that computed the value are returned.
    """
    for at in range(len(sums[0])):
        wrong: list[int] = []
        for position in sorted(set(places)):
            ranks = [rank for rank, other in enumerate(places) if other == position]
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
def deterministic_layers(layers: Sequence[MoELayer]) -> Iterator[None]:
    """Use fixed layouts and kernels in these layers, so that twins' results are bitwise equal."""
    before = torch.are_deterministic_algorithms_enabled()
    only = torch.is_deterministic_algorithms_warn_only_enabled()
    with ExitStack() as stack:
        stack.callback(torch.use_deterministic_algorithms, before, warn_only=only)
        torch.use_deterministic_algorithms(True, warn_only=only or not before)
        for layer in layers:
            stack.enter_context(layer.routed_experts.with_fixed_layout())
        yield


class _Recorder:
    """Records checksums of the values that a model computes, in the order of computation.

    Attributes:
        sums: checksum of each recorded value, int64 [2].
        names: description of each recorded value.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.sums: list[Tensor] = []
        self.names: list[str] = []
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
        """Record the loss and the gradients of all parameters, without changing their `grad`."""
        self.add("the loss", loss)
        named = [(name, p) for name, p in self.model.named_parameters() if p.requires_grad]
        grads = torch.autograd.grad(loss, [p for _, p in named], allow_unused=True)
        for (name, _), gradient in zip(named, grads, strict=True):
            if gradient is not None:
                self.add(f"the gradient of {name!r}", gradient)

    def add(self, name: str, x: Tensor) -> None:
        self.names.append(name)
        self.sums.append(checksum(x))

    def _before(self, name: str) -> Callable[..., None]:
        """Return a hook for experts that records the gradients of the rows before these gradients
        are sent to other ranks.
        """
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
    """Return two checksums of a tensor's bits, as int64 [2] on the tensor's device.

    The first checksum changes if any single bit changes. The second checksum changes if two
    elements are swapped.
    """
    bytes_N = x.detach().contiguous().view(-1).view(torch.uint8)
    words_N = torch.nn.functional.pad(bytes_N, (0, -len(bytes_N) % 8)).view(torch.int64)
    # odd factors, so that products modulo 2^64 lose no information
    factors_N = torch.arange(len(words_N), device=x.device, dtype=torch.int64) * 2 + 1
    return torch.stack([words_N.sum(), (words_N * (factors_N * 0x9E3779B97F4A7C1)).sum()])
