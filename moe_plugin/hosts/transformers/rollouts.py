"""Routing of rollouts, replayed in models of `transformers`, whose routers are their own.

Every family writes its own router, and each takes the experts of a token by one `topk` of [T, E]
scores, whose values become the weights. While a rollout is replayed, that call gives the experts of
the rollout, and their scores.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from moe_plugin.experts.matrices import of_transformers
from moe_plugin.hosts.transformers.experts import first_stack
from moe_plugin.routing.rollouts import check_tokens, choices_of_layers


@contextmanager
def replay_rollouts(model: nn.Module, ids_TLK: Tensor,
                    layers: Sequence[int] | None = None) -> Iterator[None]:
    """While open, each block with experts takes those that samples were generated with, whatever
    computes them. See `moe_plugin.routing.rollouts.replay_rollouts`, for arguments and errors.

    A balance loss of the model itself (`output_router_logits`) counts the router's own choices.

    Raises:
        ValueError: besides, of a model that replays others already; at the end of a block's pass,
            a router that chooses in another way; at the end, a block without a pass.
    """
    blocks = [(block, part) for block in model.modules() for part in block.children()
              if of_transformers(part)]
    for block, _ in blocks:
        if any(isinstance(hook, _Begin) for hook in block._forward_pre_hooks.values()):
            raise ValueError(f"a {type(block).__name__} replays other routed experts: must replay "
                             "one rollout at a time; close the replay_rollouts around this one")
    experts = [first_stack(part).shape[0] for _, part in blocks]
    with ExitStack() as stack:
        passed = set[nn.Module]()
        for (block, _), ids_TK, count in zip(
                blocks, choices_of_layers(ids_TLK, layers, experts), experts, strict=True):
            for handle in _hooks(block, ids_TK, count, passed):
                stack.callback(handle.remove)
        yield
    for block, _ in blocks:
        if block not in passed:
            raise ValueError(
                f"a {type(block).__name__} had no pass that could replay: must have one; a model "
                "that was compiled before does not see it: compile it inside, or call "
                "torch._dynamo.reset() first")


def _hooks(block: nn.Module, ids_TK: Tensor, experts: int,
           passed: set[nn.Module]) -> tuple[Any, Any]:
    begin = _Begin(ids_TK, experts, passed)

    def end(_: nn.Module, args: Any, output: Any) -> None:
        mode = begin.modes.pop()
        mode.__exit__(None, None, None)
        if output is not None:  # else an error is on its way
            mode.check(block)

    return block.register_forward_pre_hook(begin), block.register_forward_hook(
        end, always_call=True)


class _Begin:
    """Before a pass of a block. modes: of passes that have begun."""

    def __init__(self, ids_TK: Tensor, experts: int, passed: set[nn.Module]) -> None:
        self.ids_TK, self.experts, self.passed = ids_TK, experts, passed
        self.modes: list[_TopK] = []

    def __call__(self, block: nn.Module, _: Any) -> None:
        self.passed.add(block)
        self.modes.append(_TopK(self.ids_TK, self.experts))
        self.modes[-1].__enter__()


class _TopK(TorchFunctionMode):
    """Has one `topk` of the scores of all experts choose `ids_TK`."""

    def __init__(self, ids_TK: Tensor, experts: int) -> None:
        super().__init__()
        self.ids_TK, self.experts = ids_TK, experts
        self.chosen = 0
        self.seen: tuple[int, int] | None = None

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (),
                           kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if func not in (torch.topk, torch.Tensor.topk):
            return found
        scores = kwargs["input"] if kwargs and "input" in kwargs else args[0]
        if scores.shape[-1] != self.experts or found.indices.dim() > 3:
            return found
        self.seen = (found.indices[..., 0].numel(), found.indices.shape[-1])
        if self.seen[1] != self.ids_TK.shape[1]:
            return found
        check_tokens(self.ids_TK, *self.seen)
        self.chosen += 1
        ids = self.ids_TK.to(scores.device).view(found.indices.shape)
        ids = torch.where((ids < 0).any(-1, keepdim=True), found.indices, ids)
        return torch.return_types.topk((scores.gather(-1, ids), ids))

    def check(self, block: nn.Module) -> None:
        """`ValueError` unless one choice of experts was replaced."""
        if self.chosen == 1:
            return
        if not self.chosen and self.seen:
            check_tokens(self.ids_TK, *self.seen)
        raise ValueError(
            f"{type(block).__name__} called topk of the scores of its {self.experts} experts "
            f"{self.chosen} times in a pass: must be once, for rollouts to be replayed; put our "
            "layer in its place with moe_plugin.hosts.plain.huggingface.swap_moe_blocks")
