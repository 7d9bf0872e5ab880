"""Pre-gated MoE, in which each block chooses the experts of the next block.

The gate of block n+1, which is called its pre-gate, reads the same input as the experts of block n.
The experts of block n+1 are therefore known one block earlier. The pre-gate remains the `router` of
block n+1 in parameter names and checkpoints, but block n calls it. Fine-tuning can therefore start
from a checkpoint with ordinary gates, because each pre-gate starts with the weights of the gate of
its block. The first block also has a gate for its own experts, and the last block does not call a
pre-gate. Source: Hwang et al., 2024 (Pre-gated MoE).

`link` connects the layers of a model or of one pipeline stage. The first block of each stage has a
gate for its own experts. The function replaces the routing of each layer with a `NextBlockRouting`,
and registers hooks on the layer. A `RoutingMailbox` between two neighboring blocks passes the
decision: block n stores the decision there, and block n+1 removes it in the same forward pass.

Gradients of the gate weights and of the balance losses are passed back on a separate path that is
not part of torch's graph. Block n+1 treats these values as leaves and stores their gradients. The
backward pass of block n, which always runs later, reads the stored gradients. As a result, a block
can be recomputed separately (activation checkpointing), because its decision is recorded together
with the block (`routing.replay`).
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
    """A decision that is passed to the next block, and the gradients that are passed back.

    Attributes:
        routing: the decision, detached from the graph.
        gradients: gradients of `_values(routing)`. The gradients are set by the backward pass of
            the block that used the decision, and read by the backward pass of the block that made
            it. The value is None if there are no gradients.
    """

    routing: Routing | None = None
    gradients: tuple[Tensor | None, ...] | None = None


class RoutingMailbox:
    """The decision that one block passes to the next block in the current forward pass.

    If a forward pass ends with an exception, the decision that it left in the mailbox is replaced
    in the next pass. Calls without tokens use a separate slot. A rank makes such calls to take part
    in the collectives of other ranks while its own pass is in progress.
    """

    def __init__(self) -> None:
        self._waiting: dict[bool, PendingRouting] = {}

    def put(self, pending: PendingRouting, tokens: int) -> None:
        """Store a decision. The block that made the decision calls this method."""
        self._waiting[tokens > 0] = pending

    def take(self, tokens: int) -> PendingRouting:
        """Remove the stored decision and return it.

        Raises:
            ValueError: If no decision is stored, or if it is for a different number of tokens.
        """
        pending = self._waiting.pop(tokens > 0, None)
        if pending is None:
            raise ValueError(
                f"No pre-gate has chosen experts for these {tokens} tokens. Each forward pass must "
                "call all blocks in the order in which moe_plugin.routing.pregate.link joined "
                "them, and only torch.utils.checkpoint.checkpoint may recompute a block. "
                "Otherwise set router.pre_gate=0.")
        count = pending.routing.ids_TK.shape[0]
        if count != tokens:
            raise ValueError(
                f"A pre-gate has chosen experts for {count} tokens, but the next block received "
                f"{tokens} tokens. Call all blocks with the same tokens, or set "
                "router.pre_gate=0.")
        return pending

    def clear(self) -> None:
        """Delete all stored decisions."""
        self._waiting.clear()


@dataclass(frozen=True)
class _Decided:
    """The decision that a block makes for the next block.

    values: the values of the decision that have a gradient. The values are part of the block's
        autograd graph.
    """

    routing: Routing
    pending: PendingRouting | None = None
    values: Sequence[Tensor] = ()


class LinkableLayer(nn.Module):
    """Base class of MoE layers that may be linked with the blocks before and after them.

    Attributes:
        config, router, experts, capacity, layouts: components of `MoELayer`.
        route: method that returns the routing of a call.
        link: the object that replaces the method `route`, or None if the layer is not linked.
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
        """The width D of a token vector."""
        width: int = self.config.model_dim
        return width


class NextBlockRouting:
    """The object that routes the calls of a linked layer.

    The routing may have been decided by the previous block, and the layer may decide or predict the
    routing of the next block.

    Attributes:
        layer: the layer whose method `route` is replaced by this object.
        following: the next block in the model. The `router` of this block is the pre-gate or
            predicts the routing. The value is None for the last block.
        inbox: mailbox that contains decisions of the previous block, or None if the layer's own
            gate decides.
        outbox: mailbox that contains decisions for the next block. The value is None if this block
            does not decide for the next block.
    """

    def __init__(self, layer: LinkableLayer, following: LinkableLayer | None,
                 inbox: RoutingMailbox | None, outbox: RoutingMailbox | None) -> None:
        self.layer, self.following, self.inbox, self.outbox = layer, following, inbox, outbox
        self._decided: _Decided | None = None  # decision of the current call
        self._hooks: list[Any] = []

    def attach(self) -> None:
        """Replace the routing of the layer, and register hooks on the output and on the experts of
        the layer.
        """
        self.layer.link, self.layer.route = self, self.route  # type: ignore[method-assign]
        if self.following is None:
            return
        self._hooks.append(self.layer.register_forward_hook(self._tie))
        # Only stored experts must be fetched before they can compute.
        if self.following.experts.stored:
            self._hooks.append(self.layer.experts.register_forward_pre_hook(self._while_computing))

    def detach(self) -> None:
        """Restore the original routing of the layer and remove the hooks."""
        for hook in self._hooks:
            hook.remove()
        self.layer.link = None
        # Deleting the attribute of the instance makes the method of the class visible again.
        del self.layer.route

    def route(self, tokens: Tokens, top_k: int | None) -> Routing:
        """Return the routing of a call; see `MoELayer.route`.

        Raises:
            ValueError: If the decision in the mailbox does not match the call, or if a `torch.func`
                transform is applied to it.
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
        """Return the decision that the previous block made."""
        count = tokens.x_TD.shape[0]
        pending = replayed(self, lambda: inbox.take(count), self.layer.training,
                           what="received decision", values=False)
        routing = pending.routing
        if top_k not in (None, routing.ids_TK.shape[1]):
            raise ValueError(
                f"top_k={top_k} differs from the {routing.ids_TK.shape[1]} experts per token that "
                "the pre-gate has chosen. Pass the same top_k to all blocks.")
        # Without a gradient of the input, backward would not reach the block that decided.
        if not (torch.is_grad_enabled() and tokens.x_TD.requires_grad):
            return routing
        values = _Receive.apply(pending, tokens.x_TD, *_values(routing))
        return _with_values(routing, values)

    def _decide(self, outbox: RoutingMailbox, tokens: Tokens, top_k: int | None) -> _Decided:
        """Choose the experts of the next block, and store the decision in that block's inbox."""
        if torch.compiler.is_compiling():
            raise ValueError("router.pre_gate=1 cannot be used with torch.compile. Set "
                             "router.pre_gate=0, run the model without torch.compile, or compile "
                             "only the parts between the MoE layers.")
        after = self.following
        routing = _routed(after, tokens, top_k)
        new_pendings: list[PendingRouting] = []

        def new() -> PendingRouting:
            new_pendings.append(PendingRouting())
            return new_pendings[0]

        pending = replayed(self, new, self.layer.training, what="sent decision", values=False)
        values = _values(routing)
        if new_pendings:  # in a recomputation the next block has already received the decision
            decided = _with_values(routing, [x.detach() for x in values])
            pending.routing = replace(decided, sizes=_start_sizes(after, decided))
            outbox.put(pending, tokens.x_TD.shape[0])
        return _Decided(routing, pending, values)

    def _tie(self, layer: nn.Module, args: Any, output: MoEOutput) -> MoEOutput:
        """Return the block's output unchanged, but connected to the gradients of the decision."""
        decided, self._decided = self._decided, None
        values = () if decided is None else decided.values
        if not torch.is_grad_enabled() or not any(x.requires_grad for x in values):
            return output
        y = _Send.apply(decided.pending, output.output, *values)
        return replace(output, output=y)

    def _while_computing(self, experts: nn.Module, args: tuple[ExpertRows]) -> Any:
        """Start to fetch the next block's chosen experts while this block computes its experts."""
        decided, after = self._decided, self.following
        if decided is None:
            return None
        ids_TK = decided.routing.ids_TK
        return (replace(args[0], started=lambda: after.experts.prefetch(ids_TK)),)

    def forget(self) -> None:
        """Delete a decision that the next block has not received."""
        if self.outbox is not None:
            self.outbox.clear()


def _routed(layer: LinkableLayer, tokens: Tokens, top_k: int | None) -> Routing:
    return layer.router(tokens.x_TD, tokens.mask_T, top_k, tokens.info)


def _start_sizes(layer: LinkableLayer, routing: Routing) -> Any:
    """Start an agreement of all ranks on the sizes of a layer's next call.

    The result is None if the choices do not yet determine the sizes. The agreement is collective,
    so all ranks must start it in the same order of calls.
    """
    if not layer.capacity.keeps_all(layer.training):
        return None
    return layer.routed_experts.start_sizes(routing, layer.training)


def link(model: nn.Module) -> int:
    """Link the MoE layers of a model, so that each layer chooses (`router.pre_gate`) or predicts
    (`router.predict`) the experts of the next layer.

    Layers are linked in the order of the model's modules. Each forward pass must call each layer
    once and in this order. For a model with several stacks, or several pipeline stages in one
    process, call this function for each stack or stage. A model in which neither setting is used is
    not changed.

    Returns: The number of layers with a pre-gate, which is the number of layers minus one.
    Raises:
        ValueError: If only some layers set `router.pre_gate`, or if neighboring layers differ in
            width.
    """
    layers = [module for module in model.modules() if isinstance(module, LinkableLayer)]
    asked = [bool(layer.config.router.pre_gate) for layer in layers]
    if any(asked) and not all(asked):
        raise ValueError(f"router.pre_gate={list(map(int, asked))} differs between the layers of "
                         "a model. Set it to 1 for all layers, or to 0 for all layers.")
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
    # One mailbox between each pair of neighbours. The first layer has no inbox, the last no outbox.
    boxes = [RoutingMailbox() for _ in layers[1:]]
    for layer, after, inbox, outbox in zip(layers, [*layers[1:], None], [None, *boxes],
                                           [*boxes, None], strict=True):
        NextBlockRouting(layer, after, inbox, outbox).attach()
    logger.info(
        "Pre-gates choose the experts of MoE layers 2 to %d of %d in the block before each layer. "
        "With a checkpoint without pre-gates, each pre-gate starts as the gate of its layer.",
        len(layers),
        len(layers))
    return len(layers) - 1


def _predictable(before: LinkableLayer, after: LinkableLayer) -> bool:
    """Return true if knowing the choices of the next block earlier saves time."""
    return before.model_dim == after.model_dim and after.experts.stored


def _check_widths(layers: Sequence[LinkableLayer]) -> None:
    for before, after in zip(layers, layers[1:], strict=False):
        if before.model_dim != after.model_dim:
            raise ValueError(
                f"A pre-gate cannot connect blocks of width {before.model_dim} and "
                f"{after.model_dim}, because the widths must be equal. Set router.pre_gate=0, or "
                "link each stack separately.")


def has_own_gate(layer: LinkableLayer) -> bool:
    """Return true if a layer chooses its own experts, instead of the previous block."""
    return layer.link is None or layer.link.inbox is None


def chosen_together(layer: LinkableLayer) -> Iterator[LinkableLayer]:
    """Yield a layer, and the following layers whose experts are chosen by the previous block."""
    current: LinkableLayer | None = layer
    while current is not None:
        yield current
        linked = current.link is not None and current.link.outbox is not None
        current = current.link.following if linked else None


def _values(routing: Routing) -> list[Tensor]:
    """Return the values of a routing decision that have a gradient."""
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
    """Return the values of a decision as leaves of the graph, and store their gradients in
    `PendingRouting`.

    The block's input is an argument of this function, so that its backward pass runs before the
    backward pass of the previous block.
    """

    @staticmethod
    def forward(ctx: Any, pending: PendingRouting, x_TD: Tensor,
                *values: Tensor) -> tuple[Tensor, ...]:
        # Missing gradients stay None, so that the deciding block need not compute with zeros.
        ctx.pending = pending
        ctx.set_materialize_grads(False)
        return tuple(value.view_as(value) for value in values)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[None, ...]:
        ctx.pending.gradients = grads
        return (None, None, *(None for _ in grads))


class _Send(torch.autograd.Function):
    """Return the output of a block. In the backward pass, the decision receives the gradients that
    the next block stored.
    """

    @staticmethod
    def forward(ctx: Any, pending: PendingRouting, y_TD: Tensor, *values: Tensor) -> Tensor:
        ctx.pending, ctx.count = pending, len(values)
        return y_TD.view_as(y_TD)

    @staticmethod
    def backward(ctx: Any, grad_TD: Tensor) -> tuple[Tensor | None, ...]:
        pending = ctx.pending
        # Cleared, because another backward pass over the same graph brings new gradients.
        gradients, pending.gradients = pending.gradients, None
        return (None, grad_TD, *(gradients or (None,) * ctx.count))
