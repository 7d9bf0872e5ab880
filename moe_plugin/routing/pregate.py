"""Pre-gated MoE: each block chooses the experts of the next one.

The gate of block n+1, its pre-gate, reads what block n's experts read: which experts run next is
known one block early. It stays the `router` of block n+1 in names and checkpoints; block n calls
it. So a checkpoint of ordinary gates is where fine-tuning starts: the pre-gate that feeds block n+1
begins as the gate of block n+1. The first block has its own gate as well; the last one feeds none.
Source: Hwang et al. 2024 (Pre-gated MoE).

`link` joins the layers of a model, or of one pipeline stage of it, whose first block then has its
own gate: it puts a `NextBlockRouting` in the place of each layer's routing, and hooks on the layer.
A decision travels in a `RoutingMailbox` that two neighbours share: block n puts it there, block n+1
takes it out in the same forward pass.

Gradients of the gate weights and of the balance losses travel back on a path of their own, not in
torch's graph: block n+1 takes them as leaves and leaves their gradients where block n's backward
pass picks them up, which always comes later. So a block can be recomputed alone (activation
checkpointing), as its decision is recorded with it (`routing.replay`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from moe_plugin.kernels.activations import not_transformed, transformed
from moe_plugin.output import MoEOutput
from moe_plugin.records import ExpertRows, Routing, Tokens
from moe_plugin.routing.registry import Unlinked
from moe_plugin.routing.replay import replayed

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class PendingRouting:
    """A decision on its way to the next block, and its gradients on their way back.

    Attributes:
        routing: without a graph.
        gradients: of `_values(routing)`, from backward of the block that used them to backward of
            the one that decided; None: there are none.
    """

    routing: Routing | None = None
    gradients: tuple[Tensor | None, ...] | None = None


class RoutingMailbox:
    """Between two blocks: the decision of the forward pass under way.

    One that a forward pass left here, because it ended by an exception, is replaced by the next
    one's. A call without tokens, by which a rank takes part in the calls of others while a pass of
    its own is under way, has a place of its own.
    """

    def __init__(self) -> None:
        self._waiting: dict[bool, PendingRouting] = {}

    def put(self, pending: PendingRouting, tokens: int) -> None:
        """Called by the block that decided."""
        self._waiting[tokens > 0] = pending

    def take(self, tokens: int) -> PendingRouting:
        """What was put, once.

        Raises:
            ValueError: nothing is here, or it is of another number of tokens.
        """
        pending = self._waiting.pop(tokens > 0, None)
        if pending is None:
            raise ValueError(
                f"no pre-gate has decided for these {tokens} tokens: each forward pass must call "
                "the blocks in the order in which moe_plugin.routing.pregate.link joined them, and "
                "a recomputation must be one of torch.utils.checkpoint.checkpoint; call all of "
                "them, or set router.pre_gate=0")
        count = pending.routing.ids_TK.shape[0]
        if count != tokens:
            raise ValueError(
                f"a pre-gate decided for {count} tokens, and {tokens} have come: must be equal; "
                "call the blocks with the same tokens, or set router.pre_gate=0")
        return pending

    def clear(self) -> None:
        """Drop what is waiting."""
        self._waiting.clear()


@dataclass(frozen=True)
class _Decided:
    """What a block decided for the next one. values: what has a gradient, in the block's graph."""

    routing: Routing
    pending: PendingRouting | None = None
    values: Sequence[Tensor] = ()


class LinkableLayer(nn.Module):
    """Base of an MoE layer that may be joined with the block before and after it.

    Attributes:
        config, router, experts, capacity, layouts: parts of `MoELayer`.
        route: the experts of each token of a call.
        link: what stands in the place of `route`; None: the layer knows no neighbours.
    """

    config: Any
    router: nn.Module
    experts: Any
    capacity: Any
    layouts: Any
    route: Callable[..., Routing]
    link: Any = None

    @property
    def model_dim(self) -> int:
        """D, the width of a token."""
        width: int = self.config.model_dim
        return width


class NextBlockRouting:
    """A layer's routing where blocks know each other: its decision may come from the block before,
    and it may decide, or predict, for the next one.

    Attributes:
        layer: whose `route` this stands for.
        following: the next block; its `router` is the pre-gate, or predicts; None: there is none.
        inbox: the block before puts the decision here; None: the layer's own gate decides.
        outbox: this block puts the next one's decision here; None: it decides for none.
    """

    def __init__(self, layer: LinkableLayer, following: LinkableLayer | None,
                 inbox: RoutingMailbox | None, outbox: RoutingMailbox | None) -> None:
        self.layer, self.following, self.inbox, self.outbox = layer, following, inbox, outbox
        self._decided: _Decided | None = None  # in the call under way
        self._hooks: list[Any] = []

    def attach(self) -> None:
        """Stand in the layer's way: at its routing, its output and its experts."""
        self.layer.link, self.layer.route = self, self.route  # type: ignore[method-assign]
        if self.following is None:
            return
        self._hooks.append(self.layer.register_forward_hook(self._tie))
        if self.following.experts.stored:
            self._hooks.append(self.layer.experts.register_forward_pre_hook(self._while_computing))

    def detach(self) -> None:
        """Leave the layer as it was."""
        for hook in self._hooks:
            hook.remove()
        self.layer.link = None
        del self.layer.route

    def route(self, tokens: Tokens, top_k: int | None) -> Routing:
        """See `MoELayer.route`.

        Raises:
            ValueError: what the mailbox has does not fit; `torch.func` makes the call.
        """
        if transformed():
            raise not_transformed("linked blocks (router.pre_gate, router.predict)")
        if self.inbox is None:
            routing = _routed(self.layer, tokens, top_k)
        else:
            routing = self._received(self.inbox, tokens, top_k)
        if self.outbox is not None:
            self._decided = self._decide(self.outbox, tokens, top_k)
        elif self.following is not None and not self.layer.training:
            with torch.no_grad():
                self._decided = _Decided(_routed(self.following, tokens, top_k))
        return routing

    def _received(self, inbox: RoutingMailbox, tokens: Tokens, top_k: int | None) -> Routing:
        """The decision of the block before."""
        count = tokens.x_TD.shape[0]
        pending = replayed(self, lambda: inbox.take(count), self.layer.training,
                           what="received decision", values=False)
        routing = pending.routing
        if top_k not in (None, routing.ids_TK.shape[1]):
            raise ValueError(
                f"top_k={top_k} does not fit the pre-gate's {routing.ids_TK.shape[1]} experts a "
                "token: must be equal; pass all blocks the same top_k")
        if not (torch.is_grad_enabled() and tokens.x_TD.requires_grad):
            return routing
        values = _Receive.apply(pending, tokens.x_TD, *_values(routing))
        return _with_values(routing, values)

    def _decide(self, outbox: RoutingMailbox, tokens: Tokens, top_k: int | None) -> _Decided:
        """The decision for the next block, which finds it in its inbox."""
        if torch.compiler.is_compiling():
            raise ValueError("router.pre_gate=1 does not fit torch.compile: must be 0; leave the "
                             "model as it is, or compile the parts between the MoE layers")
        after = self.following
        routing = _routed(after, tokens, top_k)
        made: list[PendingRouting] = []

        def new() -> PendingRouting:
            made.append(PendingRouting())
            return made[0]

        pending = replayed(self, new, self.layer.training, what="sent decision", values=False)
        values = _values(routing)
        if made:  # in a recomputation the next block has it already
            decided = _with_values(routing, [x.detach() for x in values])
            pending.routing = replace(decided, sizes=_start_sizes(after, decided))
            outbox.put(pending, tokens.x_TD.shape[0])
        return _Decided(routing, pending, values)

    def _tie(self, layer: nn.Module, args: Any, output: MoEOutput) -> MoEOutput:
        """The block's output, unchanged; its backward pass takes the decision's gradients along."""
        decided, self._decided = self._decided, None
        values = () if decided is None else decided.values
        if not torch.is_grad_enabled() or not any(x.requires_grad for x in values):
            return output
        y = _Send.apply(decided.pending, output.output, *values)
        return replace(output, output=y)

    def _while_computing(self, experts: nn.Module, args: tuple[ExpertRows]) -> Any:
        """The next block's experts that were chosen are fetched while this one's compute."""
        decided, after = self._decided, self.following
        if decided is None:
            return None
        ids_TK = decided.routing.ids_TK
        return (replace(args[0], started=lambda: after.experts.prefetch(ids_TK)),)

    def forget(self) -> None:
        """Drop a decision that was not taken."""
        if self.outbox is not None:
            self.outbox.clear()


def _routed(layer: LinkableLayer, tokens: Tokens, top_k: int | None) -> Routing:
    return layer.router(tokens.x_TD, tokens.mask_T, top_k, tokens.info)


def _start_sizes(layer: LinkableLayer, routing: Routing) -> Any:
    """Begin to agree with other ranks on the sizes of a layer's next call, whose choices are known;
    None: there is nothing to agree on yet. Collective, in the order of calls.
    """
    if not layer.capacity.keeps_all(layer.training):
        return None
    return layer.routed_experts.start_sizes(routing, layer.training)


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
    layers = [module for module in model.modules() if isinstance(module, LinkableLayer)]
    asked = [bool(layer.config.router.pre_gate) for layer in layers]
    if any(asked) and not all(asked):
        raise ValueError(f"router.pre_gate={list(map(int, asked))} differs between the layers of "
                         "a model: must be equal; set it to 1 for all of them, or to 0")
    if any(asked):
        _check_widths(layers)
    for layer in layers:
        if layer.link is not None:
            layer.link.detach()
        elif isinstance(vars(layer).get("route"), Unlinked):
            del layer.route
    if not any(asked):
        for before, after in zip(layers, layers[1:], strict=False):
            if before.config.router.predict and _predictable(before, after):
                NextBlockRouting(before, after, None, None).attach()
        return 0
    boxes = [RoutingMailbox() for _ in layers[1:]]
    for layer, after, inbox, outbox in zip(layers, [*layers[1:], None], [None, *boxes],
                                           [*boxes, None], strict=True):
        NextBlockRouting(layer, after, inbox, outbox).attach()
    logger.info(
        "pre-gates choose the experts of MoE layers 2 to %d of %d, each in the block before; from "
        "a checkpoint without pre-gates each starts as the gate of its layer", len(layers),
        len(layers))
    return len(layers) - 1


def _predictable(before: LinkableLayer, after: LinkableLayer) -> bool:
    """Whether it pays to know early what the block after will choose."""
    return before.model_dim == after.model_dim and after.experts.stored


def _check_widths(layers: Sequence[LinkableLayer]) -> None:
    for before, after in zip(layers, layers[1:], strict=False):
        if before.model_dim != after.model_dim:
            raise ValueError(
                f"a pre-gate between blocks of width {before.model_dim} and {after.model_dim} does "
                "not fit: must be equal; set router.pre_gate=0, or link each stack by itself")


def has_own_gate(layer: LinkableLayer) -> bool:
    """Whether a layer's experts are chosen in the layer itself, not one block early."""
    return layer.link is None or layer.link.inbox is None


def chosen_together(layer: LinkableLayer) -> Iterator[LinkableLayer]:
    """A layer, and those after it whose experts are chosen one block early."""
    here: LinkableLayer | None = layer
    while here is not None:
        yield here
        linked = here.link is not None and here.link.outbox is not None
        here = here.link.following if linked else None


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
    """A decision's values as leaves; their gradients go into `PendingRouting`.

    The block's input is an argument, so that backward comes here before the block before.
    """

    @staticmethod
    def forward(ctx: Any, pending: PendingRouting, x_TD: Tensor,
                *values: Tensor) -> tuple[Tensor, ...]:
        ctx.pending = pending
        ctx.set_materialize_grads(False)
        return tuple(value.view_as(value) for value in values)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[None, ...]:
        ctx.pending.gradients = grads
        return (None, None, *(None for _ in grads))


class _Send(torch.autograd.Function):
    """A block's output; backward gives its decision's values the gradients that have come back."""

    @staticmethod
    def forward(ctx: Any, pending: PendingRouting, y_TD: Tensor, *values: Tensor) -> Tensor:
        ctx.pending, ctx.count = pending, len(values)
        return y_TD.view_as(y_TD)

    @staticmethod
    def backward(ctx: Any, grad_TD: Tensor) -> tuple[Tensor | None, ...]:
        pending = ctx.pending
        found, pending.gradients = pending.gradients, None
        return (None, grad_TD, *(found or (None,) * ctx.count))
