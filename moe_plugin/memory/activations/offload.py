"""Activations of a model's blocks between forward and backward: kept, computed again, or swapped.

Each block has a policy. `keep` leaves everything to autograd. `recompute` keeps the block's input
and runs the block again in backward, with the same random numbers and the same routing. `swap`
copies what autograd saves to a slower tier, and back ahead of use. All three compute the same bits.

    activations = manage(model.blocks, ["swap", "recompute", "keep"])

`moe_plugin.memory.activations.auto` makes them, and chooses policies for a given memory.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakSet, ref

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from moe_plugin.memory.activations.swap import Ledger, Saved, Swapper
from moe_plugin.memory.copier import OnDevice
from moe_plugin.memory.passes import unchanged_buffers
from moe_plugin.utils.machine import inside_backward
from moe_plugin.utils.messages import short
from moe_plugin.utils.run_feature import RunFeature, StepFacts

logger = logging.getLogger(__name__)
POLICIES = ("keep", "recompute", "swap")
Contexts = Callable[[], tuple[AbstractContextManager[Any], AbstractContextManager[Any]]]


@dataclass(frozen=True)
class Order:
    """When copies start and when compute waits for them; blocks by number.

    Attributes:
        waits, backward_waits: before forward or backward of a block, the last block whose copy out
            must have ended.
        fetches: when backward reaches a block, blocks whose copies in start then.
    """

    waits: Mapping[int, int] = field(default_factory=dict)
    backward_waits: Mapping[int, int] = field(default_factory=dict)
    fetches: Mapping[int, tuple[int, ...]] = field(default_factory=dict)


def plain_order(policies: Sequence[str]) -> Order:
    """Copies one block out while the next one computes, and one in while a later one does.

    So at most the activations of two swapped blocks are on the device.
    """
    swapped = [i for i, policy in enumerate(policies) if policy == "swap"]
    waits = {j: i for j in range(len(policies)) for i in swapped if i < j - 1}  # the last of them
    fetches = {j: tuple(i for i in swapped if i < j)[-1:] for j in range(len(policies))}
    return Order(waits, fetches=fetches)


@dataclass(frozen=True)
class BlockSizes:
    """What a block was seen to hold between forward and backward, in bytes.

    Attributes:
        activations: all storages that backward needs, the input included.
        inputs: of its inputs with gradients, at the same time.
    """

    activations: int
    inputs: int


# told of each pass: forward or backward, whether that begins (forward: when it is called; backward:
# when the gradient of the output is there) or ends (backward: that of the input), the pass
Probe = Callable[[str, bool, "Pass"], None]


class Pass:
    """One forward pass of one block, until its backward pass is done.

    Attributes:
        number: rises with every pass.
        index: of the block.
        policy: that it runs under.
        earlier: the pass before it of the same micro-batch; None: it is the first.
        input_bytes: of its inputs with gradients.
        saved: what autograd saved; None: not swapped.
    """

    def __init__(self, owner: Activations, number: int, index: int, policy: str,
                 earlier: Pass | None) -> None:
        self.owner, self.number, self.index, self.policy = owner, number, index, policy
        self.earlier, self.input_bytes = earlier, 0
        self.saved: Saved | None = None
        self.begun = self.ended = False
        self.hook: Any = None  # of the first input, which may outlive the pass
        self._later: ref[Pass] | None = None
        if earlier is not None:
            earlier._later = ref(self)
        self._counted = 0

    def of(self, index: int) -> Pass | None:
        """The same micro-batch's pass of another block; None: it has none."""
        one: Pass | None = self
        while one is not None and one.index != index:
            one = one.earlier
        return one

    def in_flight(self) -> bool:
        """Whether this pass, or a later one of its micro-batch, has its backward pass before it."""
        one: Pass | None = self
        while one is not None and one.ended:
            one = one._later and one._later()
        return one is not None

    def count(self, nbytes: int) -> None:
        """Bytes on the device that this pass now accounts for; its swapped storages count
        themselves.
        """
        self.owner.ledger.add(nbytes - self._counted)
        self._counted = nbytes

    def begin_backward(self, _: Tensor) -> None:
        """Hook of the outputs."""
        if not self.begun:
            self.begun = True
            later = self._later and self._later()
            if later and later.begun:  # its own hook comes after this one
                later.end_backward()
            if self.hook is None:  # no input has a gradient: it ends with the backward pass
                torch.autograd.Variable._execution_engine.queue_callback(self.end_backward)
            self.owner._backward_begins(self)

    def end_backward(self, _: Tensor | None = None) -> None:
        """Hook of the first input."""
        if not self.ended:
            self.ended = True
            if self.hook is not None:
                self.hook.remove()
            self.count(0)
            self.owner.tell("backward", False, self)

    def __del__(self) -> None:
        self.count(0)


class Activations(RunFeature):
    """The policies of a list of blocks; made by `manage`.

    Args:
        blocks: modules, in the order of forward.
        names: of them, for messages.
        policies: one for each.
        swapper: where activations go.
        contexts: made for each recomputed pass; see `context_fn` of `torch.utils.checkpoint`.

    Attributes:
        ledger: bytes of activations on the device. Those of blocks that keep or recompute are known
            once `sizes` are, and scale with the block's input.
        order: of copies.
        sizes: by block, as measured.
        tell: see `Probe`.
        in_flight: the most micro-batches that were between forward and backward at a time.
    """

    def __init__(self, blocks: Sequence[nn.Module], names: Sequence[str], policies: Sequence[str],
                 swapper: Swapper, contexts: Sequence[Contexts] = ()) -> None:
        _check_blocks(blocks)
        self.blocks, self.names, self.swapper = list(blocks), tuple(names), swapper
        self.contexts = tuple(contexts)
        self.sizes: dict[int, BlockSizes] = {}
        self.tell: Probe = no_probe
        self.use(policies)
        self._number, self._latest, self._step_peak = 0, None, 0
        self._passes_before, self._said = 0, False  # of the steps before; whether it was warned
        self._live: WeakSet[Pass] = WeakSet()  # of the first block
        self.in_flight = 0
        self._forwards = [block.forward for block in self.blocks]
        for index, block in enumerate(self.blocks):
            block.forward = functools.partial(self._run, index)

    @property
    def ledger(self) -> Ledger:
        return self.swapper.ledger

    def use(self, policies: Sequence[str], order: Order | None = None) -> None:
        """Other policies, from the next forward pass on. order: None: `plain_order`."""
        unknown = [policy for policy in policies if policy not in POLICIES]
        if unknown or len(policies) != len(self.blocks):
            raise ValueError(
                f"{len(policies)} policies of activations for {len(self.blocks)} blocks"
                + (f", one of them {short(unknown[0])}" if unknown else "")
                + f": must be one for each block, each of {', '.join(POLICIES)}")
        self.policies = tuple(policies)
        self.order = order or plain_order(self.policies)

    def after_step(self, facts: StepFacts | None = None) -> None:
        """Call it after each training step, on all ranks: a new peak is counted from here."""
        self._step_peak = self.ledger.peak
        self.ledger.restart()
        idle = self._number == self._passes_before and set(self.policies) != {"keep"}
        if idle and not self._said:
            self._said = True
            logger.warning(
                "activations: no block ran under its policy in this step, so all is kept; where "
                "torch.compile takes blocks into its graphs, compile each one and manage these: "
                "manage([torch.compile(block) for block in blocks])")
        self._passes_before = self._number

    def on_device(self) -> OnDevice:
        """The ledger's peak in the last step, and the policies now; for reports."""
        counts = Counter(self.policies)
        return OnDevice(self._step_peak, *(counts[policy] for policy in POLICIES))

    def release(self) -> None:
        """Give the blocks their own `forward` back, and the tier its room."""
        for block, forward in zip(self.blocks, self._forwards, strict=True):
            if getattr(forward, "__self__", None) is block:  # its class's
                del block.forward
            else:
                block.forward = forward
        self.swapper.copier.close()

    def _run(self, index: int, *args: Any, **kwargs: Any) -> Any:
        forward = self._forwards[index]
        if not torch.is_grad_enabled() or torch.compiler.is_compiling() or inside_backward():
            return forward(*args, **kwargs)
        one = self._begin(index)
        inputs = [x for x in tensors((args, kwargs)) if x.requires_grad]
        one.input_bytes = sum({x.untyped_storage().data_ptr(): x.nbytes for x in inputs}.values())
        run = {"keep": self._keep, "recompute": self._recompute, "swap": self._swap}[one.policy]
        try:
            self._wait(one, self.order.waits)
            self.tell("forward", True, one)
            output = run(one, forward, args, kwargs)
            self.tell("forward", False, one)
        except BaseException:
            self._latest = None
            self.swapper.forget()
            raise
        outputs = [x for x in tensors(output) if x.requires_grad]
        for x in outputs:
            x.register_hook(one.begin_backward)
        if not outputs:  # there is no backward pass
            one.ended = True
            one.count(0)
        elif inputs:
            one.hook = inputs[0].register_hook(one.end_backward)
        return output

    def _begin(self, index: int) -> Pass:
        earlier = self._latest
        if earlier is not None and (index <= earlier.index or earlier.begun):
            earlier = None  # another micro-batch
        self._number += 1
        self._latest = Pass(self, self._number, index, self.policies[index], earlier)
        if index == 0:
            self._live.add(self._latest)
            self.in_flight = max(self.in_flight, sum(one.in_flight() for one in self._live))
        return self._latest

    def _wait(self, one: Pass, waits: Mapping[int, int]) -> None:
        before = one.of(waits.get(one.index, -1))
        if before is not None:
            self.swapper.leave(before.number)

    def _keep(self, one: Pass, forward: Any, args: Any, kwargs: Any) -> Any:
        output = forward(*args, **kwargs)
        one.count(self._activation_bytes(one))
        return output

    def _recompute(self, one: Pass, forward: Any, args: Any, kwargs: Any) -> Any:
        one.count(one.input_bytes)
        # a rank that stops early would leave out collectives that others wait in
        with set_checkpoint_early_stop(False):
            return checkpoint(_call, forward, args, kwargs, use_reentrant=False,
                              context_fn=functools.partial(self._contexts, self.blocks[one.index]))

    def _swap(self, one: Pass, forward: Any, args: Any, kwargs: Any) -> Any:
        masks = [x for x in tensors((args, kwargs)) if not x.requires_grad]
        block = self.blocks[one.index]
        one.saved = Saved(self.swapper, self.names[one.index], one.number,
                          itertools.chain(masks, block.parameters(), block.buffers()))
        with one.saved.hooks():
            output = forward(*args, **kwargs)
        one.count(one.saved.stayed)
        return output

    def _contexts(self, block: nn.Module) -> tuple[Any, Any]:
        made = [make() for make in self.contexts]
        return (_all([first for first, _ in made]),
                _all([unchanged_buffers(block), *(second for _, second in made)]))

    def _activation_bytes(self, one: Pass) -> int:
        """As measured for the block, for an input of this size."""
        sizes = self.sizes.get(one.index)
        if sizes is None:
            return 0
        return sizes.activations * one.input_bytes // max(1, sizes.inputs)

    def _backward_begins(self, one: Pass) -> None:
        self.tell("backward", True, one)
        self._wait(one, self.order.backward_waits)
        if one.policy == "recompute":
            one.count(max(one.input_bytes, self._activation_bytes(one)))
        wanted = [one, *map(one.of, self.order.fetches.get(one.index, ()))]
        for other in wanted:
            if other is not None and other.saved is not None:
                other.saved.fetch()


def no_probe(what: str, begins: bool, one: Pass) -> None:
    """A `Probe` that ignores what it is told."""


def _call(forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    # all arguments by position: the checkpoint looks there for devices with random numbers
    return forward(*args, **kwargs)


def _check_blocks(blocks: Sequence[nn.Module]) -> None:
    if len(blocks) < 1 or len({id(block) for block in blocks}) < len(blocks):
        raise ValueError(f"{len(blocks)} blocks, {len({id(b) for b in blocks})} of them different: "
                         "must be at least one, and each once; give the modules that run one after "
                         "another")
    for number, block in enumerate(blocks):
        run = vars(block).get("forward")
        if isinstance(run, functools.partial) and isinstance(
                getattr(run.func, "__self__", None), Activations):
            raise ValueError(f"the activations of block {number} are managed already; release() "
                             "the first one's, or leave one out")


def tensors(value: Any) -> Iterator[Tensor]:
    """All tensors in nested tuples, lists, dicts and records, in order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for each in value:
            yield from tensors(each)
    elif isinstance(value, Mapping):
        yield from tensors(tuple(value.values()))
    elif dataclasses.is_dataclass(value):
        yield from tensors(tuple(getattr(value, f.name) for f in dataclasses.fields(value)))


@contextmanager
def _all(contexts: Sequence[AbstractContextManager[Any]]) -> Iterator[None]:
    with ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        yield
