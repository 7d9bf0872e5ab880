"""Pre-gated MoE: each block chooses the experts of the next one.

The gate of block n+1, its pre-gate, reads what block n's experts read: which experts run next is
known one block early. It stays the `router` of block n+1 in names and checkpoints; block n calls
it. So a checkpoint of ordinary gates is where fine-tuning starts: the pre-gate that feeds block n+1
begins as the gate of block n+1. The first block has its own gate as well; the last one feeds none.
Source: Hwang et al. 2024 (Pre-gated MoE).

`link` joins the layers of a model, or of one pipeline stage of it, whose first block then has its
own gate. A decision travels in a `Carrier` that two neighbours share: block n puts it there, block
n+1 takes it out in the same forward pass.

Gradients of the gate weights and of the balance losses travel back on a path of their own, not in
torch's graph: block n+1 takes them as leaves and leaves their gradients where block n's backward
pass picks them up, which always comes later. So a block can be recomputed alone (activation
checkpointing), as its decision is recorded with it (`replay`).
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from moe_plugin.kernels.derivatives import not_transformed, transformed
from moe_plugin.records import ExpertRows, Routing, Tokens
from moe_plugin.routing.replay import ReplayLog

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class Carried:
    """A decision on its way to the next block, and its gradients on their way back.

    Attributes:
        routing: without a graph. gradients: of `_values(routing)`, from backward of the block that
            used them to backward of the one that decided; None: there are none.
    """

    routing: Routing | None = None
    gradients: tuple[Tensor | None, ...] | None = None


class Carrier:
    """Between two blocks: the decision of the forward pass under way.

    One that a forward pass left here, because it ended by an exception, is replaced by the next
    one's. A call without tokens, by which a rank takes part in the calls of others while a pass of
    its own is under way, has a place of its own.
    """

    def __init__(self) -> None:
        self._waiting: dict[bool, Carried] = {}

    def put(self, carried: Carried, tokens: int) -> None:
        """Called by the block that decided."""
        self._waiting[tokens > 0] = carried

    def take(self, tokens: int) -> Carried:
        """What was put, once.

        Raises:
            ValueError: nothing is here, or it is of another number of tokens.
        """
        carried = self._waiting.pop(tokens > 0, None)
        if carried is None:
            raise ValueError(
                f"no pre-gate has decided for these {tokens} tokens: each forward pass must call "
                "the blocks in the order in which moe_plugin.routing.pregate.link joined them, and "
                "a recomputation must be recorded (moe_plugin.routing.replay.checkpoint, or "
                "HostContext(replay=True)); call all of them, or set router.pre_gate=0")
        count = carried.routing.ids_TK.shape[0]
        if count != tokens:
            raise ValueError(
                f"a pre-gate decided for {count} tokens, and {tokens} have come: must be equal; "
                "call the blocks with the same tokens, or set router.pre_gate=0")
        return carried

    def clear(self) -> None:
        """Drop what is waiting."""
        self._waiting.clear()


@dataclass(eq=False)
class Gating:
    """Where a layer's decision comes from, and for whom it decides in addition.

    Attributes:
        asked, predicts: as `router.pre_gate` and `router.predict` say; such a layer must be
            linked.
        linked: `link` has seen the layer.
        source: the block before puts the decision here; None: the layer's own gate decides.
        target: this block puts the next one's decision here; None: it decides for none.
        following: the next block; its `router` is the pre-gate, or predicts.
        received, sent: recordings for recomputations.
    """

    asked: bool
    predicts: bool
    replay: bool
    linked: bool = False
    source: Carrier | None = None
    target: Carrier | None = None
    following: PreGated | None = None
    received: ReplayLog = field(init=False)
    sent: ReplayLog = field(init=False)

    def __post_init__(self) -> None:
        self.received, self.sent = ReplayLog(self.replay), ReplayLog(self.replay)

    def routing(self, layer: PreGated, tokens: Tokens, top_k: int | None) -> Routing:
        """The layer's decision, of its gate or from the block before.

        Raises:
            ValueError: not linked; what the carrier has does not fit.
        """
        if (self.asked or self.predicts) and not self.linked:
            raise ValueError(
                f"router.{'pre_gate=1' if self.asked else 'predict=True'} needs to know which "
                "block comes next: call moe_plugin.routing.pregate.link(model) once the model is "
                "built, or leave it out")
        if self.source is None:
            return layer.router(tokens.x_TD, tokens.mask_T, top_k, tokens.info)
        if transformed():
            raise not_transformed("router.pre_gate=1")
        source, count = self.source, tokens.x_TD.shape[0]
        carried = self.received.replayed(lambda: source.take(count), layer.training, values=False)
        routing = carried.routing
        if top_k not in (None, routing.ids_TK.shape[1]):
            raise ValueError(
                f"top_k={top_k} does not fit the pre-gate's {routing.ids_TK.shape[1]} experts a "
                "token: must be equal; pass all blocks the same top_k")
        values = _values(routing)
        if not (torch.is_grad_enabled() and tokens.x_TD.requires_grad):
            return routing
        return _with_values(routing, _Receive.apply(carried, tokens.x_TD, *values))

    def ahead(self, layer: PreGated, tokens: Tokens, top_k: int | None) -> Ahead:
        """Decide for the next block, or predict what it will decide, where there is one."""
        if self.target is None:
            return self._predicted(layer, tokens, top_k)
        if torch.compiler.is_compiling():
            raise ValueError("router.pre_gate=1 does not fit torch.compile: must be 0; leave the "
                             "model as it is, or compile the parts between the MoE layers")
        if transformed():
            raise not_transformed("router.pre_gate=1")
        routing = self.following.router(tokens.x_TD, tokens.mask_T, top_k, tokens.info)
        made: list[Carried] = []

        def new() -> Carried:
            made.append(Carried())
            return made[0]

        carried = self.sent.replayed(new, layer.training, values=False)
        values = _values(routing)
        if made:  # in a recomputation the next block has it already
            decided = _with_values(routing, [x.detach() for x in values])
            carried.routing = replace(decided, sizes=self.following.start_sizes(decided))
            self.target.put(carried, tokens.x_TD.shape[0])
        return Ahead(routing, self.following, carried, values)

    def _predicted(self, layer: PreGated, tokens: Tokens, top_k: int | None) -> Ahead:
        after = self.following
        if after is None or layer.training or not after.experts.stored:
            return Ahead()
        with torch.no_grad():
            return Ahead(after.router(tokens.x_TD, tokens.mask_T, top_k, tokens.info), after)

    def forget(self) -> None:
        """Drop recordings, and a decision that was not taken."""
        self.received.forget()
        self.sent.forget()
        if self.target is not None:
            self.target.clear()


@dataclass(frozen=True)
class Ahead:
    """What a block decided for the next one, or thinks that it will decide.

    Attributes:
        routing: the decision; None: the block decides for none. after: the next block.
    """

    routing: Routing | None = None
    after: PreGated | None = None
    carried: Carried | None = None
    values: Sequence[Tensor] = ()

    def fetching(self, work: ExpertRows) -> ExpertRows:
        """The block's work; where the next block's experts are outside the device, those chosen are
        fetched while it is computed.
        """
        if self.after is None or not self.after.experts.stored:
            return work
        return replace(work, started=self._fetch)

    def _fetch(self) -> None:
        self.after.experts.prefetch(self.routing.ids_TK)

    def tie(self, y_TD: Tensor) -> Tensor:
        """The block's output, unchanged; its backward pass takes the decision's gradients along."""
        if not torch.is_grad_enabled() or not any(x.requires_grad for x in self.values):
            return y_TD
        return _Send.apply(self.carried, y_TD, *self.values)


class PreGated(nn.Module):
    """Base of layers whose decision may come from the block before.

    Attributes:
        router: the layer's own gate, or the pre-gate that the block before calls. gating: which.
        experts: see `moe_plugin.experts.base.Experts`. model_dim: D.
    """

    router: nn.Module
    experts: Any
    gating: Gating

    @property
    def model_dim(self) -> int:
        """D."""
        raise NotImplementedError

    def start_sizes(self, routing: Routing) -> Any:
        """Begin to agree with other ranks on the sizes of this layer's next call, whose choices are
        known; None: there is nothing to agree on yet. Collective, in the order of calls.
        """
        raise NotImplementedError


def link(model: nn.Module) -> int:
    """Let each MoE layer of a model choose the experts of the next one (`router.pre_gate`), or
    predict them (`router.predict`).

    Layers are joined in the order of the model's modules, which must be the order in which a
    forward pass calls them, each once. For a model with several stacks, or several stages in one
    process, call it with each of them. A model that asks for neither is left as it is.

    Returns: how many layers have a pre-gate now: one less than there are.
    Raises:
        ValueError: some layers ask for pre-gates and some do not; neighbours differ in width.
    """
    layers = [module for module in model.modules() if isinstance(module, PreGated)]
    asked = [layer.gating.asked for layer in layers]
    if not any(asked):
        for before, after in zip(layers, layers[1:], strict=False):
            same = before.gating.predicts and before.model_dim == after.model_dim
            before.gating.following = after if same else None
        for layer in layers:
            layer.gating.linked = True
        return 0
    if not all(asked):
        raise ValueError(f"router.pre_gate={list(map(int, asked))} differs between the layers of "
                         "a model: must be equal; set it to 1 for all of them, or to 0")
    for layer in layers:
        layer.gating.linked = True
        layer.gating.source = layer.gating.target = layer.gating.following = None
    for before, after in zip(layers, layers[1:], strict=False):
        if before.model_dim != after.model_dim:
            raise ValueError(
                f"a pre-gate between blocks of width {before.model_dim} and {after.model_dim} does "
                "not fit: must be equal; set router.pre_gate=0, or link each stack by itself")
        before.gating.target = after.gating.source = Carrier()
        before.gating.following = after
    logger.info(
        "pre-gates choose the experts of MoE layers 2 to %d of %d, each in the block before; from "
        "a checkpoint without pre-gates each starts as the gate of its layer", len(layers),
        len(layers))
    return len(layers) - 1


def joined(layer: PreGated) -> Iterator[PreGated]:
    """A layer, and those after it whose experts are chosen one block early."""
    here: PreGated | None = layer
    while here is not None:
        yield here
        here = None if here.gating.target is None else here.gating.following


def _values(routing: Routing) -> list[Tensor]:
    """What has a gradient."""
    more = [] if routing.passthrough_T is None else [routing.passthrough_T]
    return [routing.weights_TK, *more, *routing.losses.values()]


def _with_values(routing: Routing, values: Sequence[Tensor]) -> Routing:
    weights_TK, *more = values
    passthrough_T = None if routing.passthrough_T is None else more.pop(0)
    return replace(routing, weights_TK=weights_TK, passthrough_T=passthrough_T,
                   losses=dict(zip(routing.losses, more, strict=True)),
                   priority_T=_without_graph(routing.priority_T),
                   entropy=_without_graph(routing.entropy))


def _without_graph(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.detach()


class _Receive(torch.autograd.Function):
    """A decision's values as leaves; their gradients go into `Carried`.

    The block's input is an argument, so that backward comes here before the block before.
    """

    @staticmethod
    def forward(ctx: Any, carried: Carried, x_TD: Tensor, *values: Tensor) -> tuple[Tensor, ...]:
        ctx.carried = carried
        ctx.set_materialize_grads(False)
        return tuple(value.view_as(value) for value in values)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[None, ...]:
        ctx.carried.gradients = grads
        return (None, None, *(None for _ in grads))


class _Send(torch.autograd.Function):
    """A block's output; backward gives its decision's values the gradients that have come back."""

    @staticmethod
    def forward(ctx: Any, carried: Carried, y_TD: Tensor, *values: Tensor) -> Tensor:
        ctx.carried, ctx.count = carried, len(values)
        return y_TD.view_as(y_TD)

    @staticmethod
    def backward(ctx: Any, grad_TD: Tensor) -> tuple[Tensor | None, ...]:
        carried = ctx.carried
        found, carried.gradients = carried.gradients, None
        return (None, grad_TD, *(found or (None,) * ctx.count))
