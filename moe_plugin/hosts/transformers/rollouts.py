"""Replay the expert choices of rollouts in `transformers` models that have their own routers.

The router code differs between model families. However, every router selects the experts of a token
with one call of `topk` on scores [T, E], and uses the values returned by this call as weights.
During a replay, the call of `topk` returns the experts of the rollout, and their scores.
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
    """Make each MoE block select the same experts that were used to generate the samples.

    The choices can be replayed with any implementation of the experts. The arguments and further
    errors are described in `moe_plugin.routing.rollouts.replay_rollouts`. A balance loss that the
    model itself computes (`output_router_logits`) is still based on the choices of the model's
    routers.

    Raises:
        ValueError: If another replay is active for the model, if a router selects experts in a
            different way (raised at the end of the block's forward pass), or if a block was not
            called (raised when the context exits).
    """
    blocks = [(block, part) for block in model.modules() for part in block.children()
              if of_transformers(part)]
    for block, _ in blocks:
        if any(isinstance(hook, _Begin) for hook in block._forward_pre_hooks.values()):
            raise ValueError(f"a {type(block).__name__} already replays a rollout. Close the outer "
                             "replay_rollouts before you replay another rollout")
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
                f"a {type(block).__name__} had no forward pass that could be replayed. A model that"
                " was compiled earlier ignores the replay: compile it inside replay_rollouts, or "
                "call torch._dynamo.reset() first")


def _hooks(block: nn.Module, ids_TK: Tensor, experts: int,
           passed: set[nn.Module]) -> tuple[Any, Any]:
    begin = _Begin(ids_TK, experts, passed)

    def end(_: nn.Module, args: Any, output: Any) -> None:
        mode = begin.modes.pop()
        mode.__exit__(None, None, None)
        if output is not None:  # the output is None if the pass failed with an error
            mode.check(block)

    return block.register_forward_pre_hook(begin), block.register_forward_hook(
        end, always_call=True)


class _Begin:
    """A hook that runs before each forward pass of an MoE block. modes: torch function modes of all
    forward passes that are in progress.
    """

    def __init__(self, ids_TK: Tensor, experts: int, passed: set[nn.Module]) -> None:
        self.ids_TK, self.experts, self.passed = ids_TK, experts, passed
        self.modes: list[_TopK] = []

    def __call__(self, block: nn.Module, _: Any) -> None:
        self.passed.add(block)
        self.modes.append(_TopK(self.ids_TK, self.experts))
        self.modes[-1].__enter__()


class _TopK(TorchFunctionMode):
    """A torch function mode that replaces the output of one call of `topk` with `ids_TK`. The
    replaced call is the one that selects from the scores of all experts.
    """

    def __init__(self, ids_TK: Tensor, experts: int) -> None:
        super().__init__()
        self.ids_TK, self.experts = ids_TK, experts
        self.chosen = 0
        self.seen: tuple[int, int] | None = None

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (),
                           kwargs: Any = None) -> Any:
        original = func(*args, **(kwargs or {}))
        if func not in (torch.topk, torch.Tensor.topk):
            return original
        scores = kwargs["input"] if kwargs and "input" in kwargs else args[0]
        if scores.shape[-1] != self.experts or original.indices.dim() > 3:
            return original
        self.seen = (original.indices[..., 0].numel(), original.indices.shape[-1])
        if self.seen[1] != self.ids_TK.shape[1]:
            return original
        check_tokens(self.ids_TK, *self.seen)
        self.chosen += 1
        ids = self.ids_TK.to(scores.device).view(original.indices.shape)
        ids = torch.where((ids < 0).any(-1, keepdim=True), original.indices, ids)
        return torch.return_types.topk((scores.gather(-1, ids), ids))

    def check(self, block: nn.Module) -> None:
        """Raise a `ValueError` if the number of replaced `topk` calls is not exactly one."""
        if self.chosen == 1:
            return
        if not self.chosen and self.seen:
            check_tokens(self.ids_TK, *self.seen)
        raise ValueError(
            f"{type(block).__name__} called topk on the scores of its {self.experts} experts "
            f"{self.chosen} times in a pass. Rollouts can be replayed only if it is called once. "
            "Replace the block with this package's layer by "
            "moe_plugin.hosts.plain.huggingface.swap_moe_blocks")
