"""Policies for the activations of a model's blocks: keep, recompute and swap.

With the `keep` policy, autograd stores all saved tensors as usual. With the `recompute` policy,
only the inputs of a block are stored. The block is computed again before its backward pass, using
the same random numbers and the same routing. With the `swap` policy, the tensors that autograd
saves are copied to a slower memory tier, and are copied back before the backward pass needs them.
Outputs and gradients are bitwise equal under all three policies.

    activations = manage(model.blocks, ["swap", "recompute", "keep"])

The `manage` function is defined in `moe_plugin.memory.activations.auto`. `manage` can also choose
policies automatically for a memory limit.
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
from moe_plugin.planner.offload.activation_plan import SwapPlan
from moe_plugin.planner.offload.activation_problem import SWAP
from moe_plugin.utils.machine import inside_backward
from moe_plugin.utils.messages import short
from moe_plugin.utils.run_feature import RunFeature, StepFacts

logger = logging.getLogger(__name__)
POLICIES = ("keep", "recompute", "swap")
Contexts = Callable[[], tuple[AbstractContextManager[Any], AbstractContextManager[Any]]]


@dataclass(frozen=True)
class Order:
    """The schedule of copies: when they start, and when computation waits for them.

    Attributes:
        waits, backward_waits: mapping from a block i to a block j. The forward (or backward) pass
            of block i waits until the copies to the tier of all blocks up to j are complete.
        fetches: mapping from a block i to a tuple of blocks. When the backward pass of block i
            starts, the activations of the blocks in `fetches[i]` are copied back to the device.
    """

    waits: Mapping[int, int] = field(default_factory=dict)
    backward_waits: Mapping[int, int] = field(default_factory=dict)
    fetches: Mapping[int, tuple[int, ...]] = field(default_factory=dict)


def order_of(plan: SwapPlan) -> Order:
    """Return the schedule for a plan: when copies start, and which passes wait for them."""
    waits = plan.problem.waits(plan.decisions)
    assert waits is not None  # the plan fits
    fetches: dict[int, tuple[int, ...]] = {}
    for i in reversed(range(len(plan.decisions))):
        if plan.decisions[i] == SWAP:
            turn = waits.start[i]
            fetches[turn] = (*fetches.get(turn, ()), i)
    return Order(dict(enumerate(waits.forward)), dict(enumerate(waits.backward)), fetches)


def plain_order(policies: Sequence[str]) -> Order:
    """Return a schedule that copies each block's activations while the next block is computed.

    At any time, the activations of at most two swapped blocks are on the device.
    """
    swapped = [i for i, policy in enumerate(policies) if policy == "swap"]
    # the last such block remains
    waits = {j: i for j in range(len(policies)) for i in swapped if i < j - 1}
    fetches = {j: tuple(i for i in swapped if i < j)[-1:] for j in range(len(policies))}
    return Order(waits, fetches=fetches)


@dataclass(frozen=True)
class BlockSizes:
    """The sizes in bytes of the data that a block stores between its forward and backward passes.

    Attributes:
        activations: total size of all storages that the backward pass needs, including the inputs.
        inputs: total size of the inputs that require gradients in the same pass.
    """

    activations: int
    inputs: int


# Called for each pass with: "forward" or "backward"; whether the pass begins (forward: when it is
# called; backward: when the gradient of the output is available) or ends (backward: when the
# gradient of the input is available); the pass.
Probe = Callable[[str, bool, "Pass"], None]


class Pass:
    """The forward pass and the subsequent backward pass of one block for one micro-batch.

    Attributes:
        number: index of this pass, which increases with every new pass.
        index: index of the block.
        policy: activation policy of the block in this pass.
        earlier: pass of the previous block for the same micro-batch, or None for the first block.
        input_bytes: total size of the inputs that require gradients, in bytes.
        saved: tensors saved by autograd, or None if the activations of this pass are not swapped.
    """

    def __init__(self, owner: Activations, number: int, index: int, policy: str,
                 earlier: Pass | None) -> None:
        self.owner, self.number, self.index, self.policy = owner, number, index, policy
        self.earlier, self.input_bytes = earlier, 0
        self.saved: Saved | None = None
        self.begun = self.ended = False
        self.hook: Any = None  # hook of the first input, which may outlive the pass
        self._later: ref[Pass] | None = None
        if earlier is not None:
            earlier._later = ref(self)
        self._counted = 0

    def of(self, index: int) -> Pass | None:
        """Return the pass of block `index` for the same micro-batch, or None."""
        candidate: Pass | None = self
        while candidate is not None and candidate.index != index:
            candidate = candidate.earlier
        return candidate

    def in_flight(self) -> bool:
        """Return whether the backward pass of this block, or of a later block, is outstanding."""
        candidate: Pass | None = self
        while candidate is not None and candidate.ended:
            candidate = None if candidate._later is None else candidate._later()
        return candidate is not None

    def count(self, nbytes: int) -> None:
        """Set the number of bytes that this pass stores on the device. The bytes of swapped
        storages are not included, because they are counted separately.
        """
        self.owner.ledger.add(nbytes - self._counted)
        self._counted = nbytes

    def begin_backward(self, _: Tensor) -> None:
        """Begin the backward pass. This method is registered as a hook on the block's outputs."""
        if not self.begun:
            self.begun = True
            later = None if self._later is None else self._later()
            if later and later.begun:  # the later pass's own hook runs after this one
                later.end_backward()
            # without an input with a gradient, the pass ends with the whole backward pass
            if self.hook is None:
                torch.autograd.Variable._execution_engine.queue_callback(self.end_backward)
            self.owner._backward_begins(self)

    def end_backward(self, _: Tensor | None = None) -> None:
        """End the backward pass. This method is registered as a hook on the block's first input."""
        if not self.ended:
            self.ended = True
            if self.hook is not None:
                self.hook.remove()
            self.count(0)
            self.owner.tell("backward", False, self)

    def __del__(self) -> None:
        self.count(0)


class Activations(RunFeature):
    """An object that applies an activation policy to each block of a list. Use `manage` to create
    objects of this class.

    Args:
        blocks: modules in forward order.
        names: names of the blocks, for use in messages.
        policies: list of policies, one for each block.
        swapper: object that copies activations to the tier and back to the device.
        contexts: functions that create the contexts for recomputing a pass. See the `context_fn`
            argument of `torch.utils.checkpoint`.

    Attributes:
        ledger: counter for the bytes of activations on the device. For blocks with the policies
            keep and recompute, the bytes are known only after `sizes` has been measured. The
            measured bytes are scaled by the size of the block's input.
        order: schedule of the copies between the device and the tier.
        sizes: mapping from the index of a block to its measured sizes.
        tell: function that is called when a pass begins or ends. See `Probe`.
        in_flight: largest number of micro-batches that were between their forward and backward
            passes at the same time.
    """

    def __init__(self, blocks: Sequence[nn.Module], names: Sequence[str], policies: Sequence[str],
                 swapper: Swapper, contexts: Sequence[Contexts] = ()) -> None:
        _check_blocks(blocks)
        self.blocks, self.names, self.swapper = list(blocks), tuple(names), swapper
        self.contexts = tuple(contexts)
        self.sizes: dict[int, BlockSizes] = {}
        self.tell: Probe = no_probe
        self.use(policies)
        self._number, self._step_peak = 0, 0
        self._latest: Pass | None = None
        # number of passes before this step; whether the warning below was logged
        self._passes_before, self._said = 0, False
        self._live: WeakSet[Pass] = WeakSet()  # passes of the first block
        self.in_flight = 0
        self._forwards = [block.forward for block in self.blocks]
        for index, block in enumerate(self.blocks):
            block.forward = functools.partial(self._run, index)

    @property
    def ledger(self) -> Ledger:
        return self.swapper.ledger

    def use(self, policies: Sequence[str], order: Order | None = None) -> None:
        """Use other policies from the next forward pass on. `order` defaults to `plain_order`."""
        unknown = [policy for policy in policies if policy not in POLICIES]
        if unknown or len(policies) != len(self.blocks):
            raise ValueError(
                f"{len(policies)} activation policies were given for {len(self.blocks)} blocks"
                + (f", and {short(unknown[0])} is not a policy" if unknown else "")
                + f": use one policy for each block, each of them {', '.join(POLICIES)}")
        self.policies = tuple(policies)
        self.order = order or plain_order(self.policies)

    def after_step(self, facts: StepFacts | None = None) -> None:
        """Start measuring a new memory peak. All ranks must call this after each training step."""
        self._step_peak = self.ledger.peak
        self.ledger.restart()
        idle = self._number == self._passes_before and set(self.policies) != {"keep"}
        if idle and not self._said:
            self._said = True
            logger.warning(
                "activations: no block ran under its policy in this step, so all activations are "
                "kept; if torch.compile inlines blocks into its graphs, compile each block and "
                "manage the results: manage([torch.compile(block) for block in blocks])")
        self._passes_before = self._number

    def on_device(self) -> OnDevice:
        """Return the peak activation bytes of the last step and the number of blocks per policy."""
        counts = Counter(self.policies)
        return OnDevice(self._step_peak, *(counts[policy] for policy in POLICIES))

    def release(self) -> None:
        """Restore the original `forward` methods of the blocks, and stop the thread of the copier.
        """
        for block, forward in zip(self.blocks, self._forwards, strict=True):
            if getattr(forward, "__self__", None) is block:  # the method of its class
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
            earlier = None  # a new micro-batch begins
        self._number += 1
        self._latest = latest = Pass(self, self._number, index, self.policies[index], earlier)
        if index == 0:
            self._live.add(latest)
            self.in_flight = max(self.in_flight, sum(one.in_flight() for one in self._live))
        return latest

    def _wait(self, block_pass: Pass, waits: Mapping[int, int]) -> None:
        before = block_pass.of(waits.get(block_pass.index, -1))
        if before is not None:
            self.swapper.leave(before.number)

    def _keep(self, block_pass: Pass, forward: Any, args: Any, kwargs: Any) -> Any:
        output = forward(*args, **kwargs)
        block_pass.count(self._activation_bytes(block_pass))
        return output

    def _recompute(self, one: Pass, forward: Any, args: Any, kwargs: Any) -> Any:
        one.count(one.input_bytes)
        # with early stop, a rank could skip collectives that other ranks wait in
        with set_checkpoint_early_stop(False):
            return checkpoint(_call, forward, args, kwargs, use_reentrant=False,
                              context_fn=functools.partial(self._contexts, self.blocks[one.index]))

    def _swap(self, block_pass: Pass, forward: Any, args: Any, kwargs: Any) -> Any:
        masks = [x for x in tensors((args, kwargs)) if not x.requires_grad]
        block = self.blocks[block_pass.index]
        block_pass.saved = Saved(self.swapper, self.names[block_pass.index], block_pass.number,
                                 itertools.chain(masks, block.parameters(), block.buffers()))
        with block_pass.saved.hooks():
            output = forward(*args, **kwargs)
        block_pass.count(block_pass.saved.stayed)
        return output

    def _contexts(self, block: nn.Module) -> tuple[Any, Any]:
        made = [make() for make in self.contexts]
        return (_combined([first for first, _ in made]),
                _combined([unchanged_buffers(block), *(second for _, second in made)]))

    def _activation_bytes(self, block_pass: Pass) -> int:
        """Return the measured activation bytes, scaled by the size of this pass's input."""
        sizes = self.sizes.get(block_pass.index)
        if sizes is None:
            return 0
        return sizes.activations * block_pass.input_bytes // max(1, sizes.inputs)

    def _backward_begins(self, block_pass: Pass) -> None:
        self.tell("backward", True, block_pass)
        self._wait(block_pass, self.order.backward_waits)
        if block_pass.policy == "recompute":
            block_pass.count(max(block_pass.input_bytes, self._activation_bytes(block_pass)))
        wanted = [block_pass, *map(block_pass.of, self.order.fetches.get(block_pass.index, ()))]
        for other in wanted:
            if other is not None and other.saved is not None:
                other.saved.fetch()


def no_probe(direction: str, begins: bool, block_pass: Pass) -> None:
    """A `Probe` that does nothing."""


def _call(forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    # all arguments are positional, because the checkpoint searches them for devices with random
    # states
    return forward(*args, **kwargs)


def _check_blocks(blocks: Sequence[nn.Module]) -> None:
    if len(blocks) < 1 or len({id(block) for block in blocks}) < len(blocks):
        raise ValueError(f"the list has {len(blocks)} blocks, {len({id(b) for b in blocks})} of "
                         "them distinct: pass at least one block, and each block only once, in the "
                         "order in which the blocks run")
    for number, block in enumerate(blocks):
        run = vars(block).get("forward")
        if isinstance(run, functools.partial) and isinstance(
                getattr(run.func, "__self__", None), Activations):
            raise ValueError(f"the activations of block {number} are already managed by another "
                             "Activations object; call its release(), or leave the block out")


def tensors(value: Any) -> Iterator[Tensor]:
    """Yield all tensors in nested tuples, lists, dicts and dataclasses, in order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for entry in value:
            yield from tensors(entry)
    elif isinstance(value, Mapping):
        yield from tensors(tuple(value.values()))
    elif dataclasses.is_dataclass(value):
        yield from tensors(tuple(getattr(value, f.name) for f in dataclasses.fields(value)))


@contextmanager
def _combined(contexts: Sequence[AbstractContextManager[Any]]) -> Iterator[None]:
    with ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        yield
