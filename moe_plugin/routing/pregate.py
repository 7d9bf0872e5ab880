"""Pre-gated MoE: each block chooses the experts of the next block.

The gate of block n+1 is called a pre-gate, because it reads the same input as the experts of block
n. The experts of block n+1 are therefore known one block earlier. In parameter names and
checkpoints, the pre-gate is still the `router` of block n+1, although block n calls it. Fine-tuning
can therefore start from a checkpoint with ordinary gates. Each pre-gate starts with the weights of
its block's ordinary gate. The first block also has a gate for its own experts, and the last block
calls no pre-gate. Source: Hwang et al., 2024 (Pre-gated MoE).

`link` connects the layers of a model or of a pipeline stage. In each stage, the first block has a
gate for its own experts. `link` replaces the routing of each layer with a `NextBlockRouting` object
and registers hooks on the layer. Two neighboring blocks share a `RoutingMailbox`. Block n puts its
decision in the mailbox, and block n+1 removes the decision in the same forward pass.

The gradients of the gate weights and the balance losses are passed back outside torch's autograd
graph. Block n+1 treats the gate weights and the balance losses as leaves and stores their
gradients. The backward pass of block n always runs later and reads the stored gradients. A block
can therefore be recomputed separately (activation checkpointing), because its decision is recorded
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
    """A routing decision passed to the next block, together with the gradients passed back.

    Attributes:
        routing: routing decision, detached from the graph.
        gradients: gradients of the tensors in `_values(routing)`. The gradients are set by the
            backward pass of the block that used the decision, and read by the backward pass of the
            block that made the decision. `gradients` is None if there are no gradients.
    """

    routing: Routing | None = None
    gradients: tuple[Tensor | None, ...] | None = None


class RoutingMailbox:
    """The routing decisions passed from one block to the next during the current forward pass.

    If a forward pass ends with an exception, its decision may remain in the mailbox. The next pass
    replaces the decision of a failed pass. Decisions for calls without tokens are stored
    separately. A rank makes calls without tokens to take part in the collectives of other ranks,
    which may happen while its own pass is in progress.
    """

    def __init__(self) -> None:
        self._waiting: dict[bool, PendingRouting] = {}

    def put(self, pending: PendingRouting, tokens: int) -> None:
        """Store a decision. The block that made the decision calls this method."""
        self._waiting[tokens > 0] = pending

    def take(self, tokens: int) -> PendingRouting:
        """Remove the stored decision and return it.

        Raises:
            ValueError: If there is no decision, or if it is for a different number of tokens.
        """
        pending = self._waiting.pop(tokens > 0, None)
        if pending is None:
            raise ValueError(
                f"No pre-gate has chosen experts for these {tokens} tokens. Each forward pass must "
                "call all blocks in the order in which moe_plugin.routing.pregate.link joined "
                "them, and only torch.utils.checkpoint.checkpoint may recompute a block. "
                "Otherwise set router.pre_gate=0.")
        assert pending.routing is not None
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
    """A routing decision that a block has made for the next block.

    values: tensors of the decision that require gradients and belong to the block's graph.
    """

    routing: Routing
    pending: PendingRouting | None = None
    values: Sequence[Tensor] = ()


class LinkableLayer(nn.Module):
    """Base class of MoE layers that can be linked with the previous and the next block.

    Attributes:
        config, router, experts, capacity, layouts: components of `MoELayer`.
        route: method that returns the routing of a call.
        link: object that replaces the `route` method, or None if the layer is not linked.
    """

    config: Any
    router: nn.Module
    experts: Any
    capacity: Any
    layouts: Any
    routed_experts: Any
    route: Callable[..., Routing]
    link: Any = None

    @property
    def model_dim(self) -> int:
        """Width of a token vector, D."""
        width: int = self.config.model_dim
        return width


class NextBlockRouting:
    """An object that determines the routing of a linked layer.

    The previous block may have decided the routing of this layer, and this layer may decide or
    predict the routing of the next block.

    Attributes:
        layer: layer whose `route` method this object replaces.
        following: the next block in the model. The `router` of the next block is the pre-gate, or
            predicts the routing. `following` is None for the last block.
        inbox: mailbox for decisions of the previous block, or None if the layer's own gate decides.
        outbox: mailbox for decisions for the next block, or None if this block does not decide for
            the next block.
    """

    def __init__(self, layer: LinkableLayer, following: LinkableLayer | None,
                 inbox: RoutingMailbox | None, outbox: RoutingMailbox | None) -> None:
        self.layer, self.following, self.inbox, self.outbox = layer, following, inbox, outbox
        self._decided: _Decided | None = None  # decision of the current call
        self._hooks: list[Any] = []

    def attach(self) -> None:
        """Replace the routing of the layer, and register hooks on its output and experts."""
        self.layer.link, self.layer.route = self, self.route  # type: ignore[method-assign]
        if self.following is None:
            return
        self._hooks.append(self.layer.register_forward_hook(self._tie))
        # Only stored experts must be fetched before they can compute.
        if self.following.experts.stored:
            self._hooks.append(self.layer.experts.register_forward_pre_hook(self._while_computing))

    def detach(self) -> None:
        """Restore the original routing of the layer, and remove the hooks."""
        for hook in self._hooks:
            hook.remove()
        self.layer.link = None
        # Deleting the attribute of the instance makes the method of the class visible again.
        del self.layer.route

    def route(self, tokens: Tokens, top_k: int | None) -> Routing:
        """Return the routing of a call; see `MoELayer.route`.

        Raises:
            ValueError: If the decision in the mailbox does not match the call, or if a `torch.func`
                transform is active.
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
        count = tokens.x_TD.shape[0]
        pending = replayed(self, lambda: inbox.take(count), self.layer.training,
                           what="received decision", values=False)
        routing = pending.routing
        assert routing is not None
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
        if torch.compiler.is_compiling():
            raise ValueError("router.pre_gate=1 cannot be used with torch.compile. Set "
                             "router.pre_gate=0, run the model without torch.compile, or compile "
                             "only the parts between the MoE layers.")
        after = self.following
        assert after is not None  # a block with an outbox has a next block
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
        """Connect the block's output to the gradients of the routing decision."""
        decided, self._decided = self._decided, None
        if decided is None or not torch.is_grad_enabled() or not any(
                x.requires_grad for x in decided.values):
            return output
        y = _Send.apply(decided.pending, output.output, *decided.values)
        return replace(output, output=y)

    def _while_computing(self, experts: nn.Module, args: tuple[ExpertRows]) -> Any:
        """Load the experts chosen for the next block while this block computes."""
        decided, after = self._decided, self.following
        if decided is None or after is None:
            return None
        ids_TK = decided.routing.ids_TK
        return (replace(args[0], started=lambda: after.experts.prefetch(ids_TK)),)

    def forget(self) -> None:
        """Delete any decision that the next block has not received."""
        if self.outbox is not None:
            self.outbox.clear()


def _routed(layer: LinkableLayer, tokens: Tokens, top_k: int | None) -> Routing:
    return layer.router(tokens.x_TD, tokens.mask_T, top_k, tokens.info)


def _start_sizes(layer: LinkableLayer, routing: Routing) -> Any:
    """Start exchanging the sizes for the next call of a layer.

    Returns None if the choices alone do not determine the sizes. The exchange is collective. All
    ranks must start their exchanges in the same order.
    """
    if not layer.capacity.keeps_all(layer.training):
        return None
    return layer.routed_experts.start_sizes(routing, layer.training)


def link(model: nn.Module) -> int:
    """Link the MoE layers of a model, so that each layer chooses (`router.pre_gate`) or predicts
    (`router.predict`) the experts of the next layer.

    Layers are linked in the order of the model's modules. Each forward pass must call every layer
    exactly once, in the order of the model's modules. If a model has several stacks, or if a
    process has several pipeline stages, call this function for each stack or stage. If no layer
    uses one of the two settings, the model is not changed.

    Returns: The number of layers with a pre-gate, that is, the number of linked layers minus one.
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
            # knowing the experts of the next block earlier saves time only if they are stored
            if (before.config.router.predict and before.model_dim == after.model_dim
                    and after.experts.stored):
                NextBlockRouting(before, after, None, None).attach()
        return 0
    # One mailbox between each pair of neighbours. The first layer has no inbox, the last no outbox.
    boxes = [RoutingMailbox() for _ in layers[1:]]
    for layer, following, inbox, outbox in zip(layers, [*layers[1:], None], [None, *boxes],
                                               [*boxes, None], strict=True):
        NextBlockRouting(layer, following, inbox, outbox).attach()
    logger.info(
        "Pre-gates choose the experts of MoE layers 2 to %d of %d in the block before each layer. "
        "With a checkpoint without pre-gates, each pre-gate starts as the gate of its layer.",
        len(layers), len(layers))
    return len(layers) - 1


def _check_widths(layers: Sequence[LinkableLayer]) -> None:
    for before, after in zip(layers, layers[1:], strict=False):
        if before.model_dim != after.model_dim:
            raise ValueError(
                f"A pre-gate cannot connect blocks of width {before.model_dim} and "
                f"{after.model_dim}, because the widths must be equal. Set router.pre_gate=0, or "
                "link each stack separately.")


def has_own_gate(layer: LinkableLayer) -> bool:
    """Return whether a layer chooses its own experts. Otherwise, the previous block chooses them.
    """
    return layer.link is None or layer.link.inbox is None


def chosen_together(layer: LinkableLayer) -> Iterator[LinkableLayer]:
    """Yield a layer and the following layers whose experts are chosen by the previous block."""
    current: LinkableLayer | None = layer
    while current is not None:
        yield current
        linked = current.link is not None and current.link.outbox is not None
        current = current.link.following if linked else None


def _values(routing: Routing) -> list[Tensor]:
    more = [] if routing.passthrough_T is None else [routing.passthrough_T]
    return [routing.weights_TK, *more, *routing.losses.values()]


def _with_values(routing: Routing, values: Sequence[Tensor]) -> Routing:
    (weights_TK, *more), priority_T = values, routing.priority_T
    passthrough_T = None if routing.passthrough_T is None else more.pop(0)
    return replace(routing, weights_TK=weights_TK, passthrough_T=passthrough_T,
                   losses=dict(zip(routing.losses, more, strict=True)),
                   priority_T=None if priority_T is None else priority_T.detach(),
                   entropy=routing.entropy.detach())


class _Receive(torch.autograd.Function):
    """Return the tensors of a decision as leaves of the graph, and store their gradients in
    `PendingRouting`.

    The block's input is an argument of this function. As a result, the backward pass of `_Receive`
    runs before the backward pass of the previous block.
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
    """Return the output of a block unchanged. In the backward pass, the decision receives the
    gradients stored by the next block.
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
