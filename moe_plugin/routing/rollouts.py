"""Routing of rollouts, replayed in training (R3, arXiv 2510.11370).

About one choice in ten of a router differs between the engine that generated a sample and the model
that trains on it. Engines therefore return the experts of each token of a sample, and training
takes these in place of its own choice: weights are those that the router gives these experts now,
and gradients go through them to the router as from any choice.

    with replay_rollouts(model, tokens_of_rank(padded(samples, length))):
        loss = ...
        loss.backward()     # inside, so that recomputed layers choose the same again

A sample is what vLLM (`CompletionOutput.routed_experts`) and SGLang (`meta_info["routed_experts"]`,
base64 of int32) return: [tokens, layers, K], the prompt first. The last token was generated and
never computed, so an engine has no choice for it: there, and wherever else a choice is -1, the
router chooses itself.

Shapes: T tokens, B samples, S their padded length, L layers with experts, K experts per token.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from moe_plugin.routing.call import RoutingCall
from moe_plugin.routing.contract import RouterModule
from moe_plugin.utils.messages import short


# Choices that a router does not make itself: loads for benchmarks, and routing traces.
#
# `router.force: balance` replaces the choice of a router, and nothing else, in every call. Let N be
# the real tokens of a rank's call and n = 0, ..., N-1 their numbers in it. Token n goes to experts
#
#     (n + floor(j E / k)) mod E     for j = 0, ..., k-1
#
# These are k different ones, spread evenly over all experts, and so over as many ranks as can be.
# Each expert gets floor(N k / E) or ceil(N k / E) of a rank's choices; the same in each layer and
# call. Padding takes part in nothing.
#
# * Weights are those that the router gives these experts: its scores, divided by their sum as
#   `router.normalize` says, times `router.scaling`. Gradients go through them to the router and to
#   the tokens as from any choice; the choice itself has none, as ever.
# * Losses are taken of the forced choice and the router's own scores. A load that is even makes the
#   load terms of `switch`, `gshard`, `sequence` and `global_batch` constants 1/E: with a softmax
# they
#   are 1 and have no gradient, where E divides N k. The loss `z` is as without it.
# * Biases (`sigmoid_bias`) count the forced choice, and stay where it is even.
#
# Megatron's `--moe-router-force-load-balancing` is another thing, and is Megatron's own here:
# random
# logits, which are even on average alone, and whose weights are of the random logits, too.
def balanced(call: RoutingCall) -> Tensor:
    """The experts of each token as the module says, int64 [T, K]; padding's are of no use."""
    number_T = call.real_T.long().cumsum(0) - 1
    step_K = [j * call.experts // call.k for j in range(call.k)]
    return (number_T[:, None] + number_T.new_tensor(step_K)) % call.experts


def check_replaceable(router: nn.Module, what: str) -> None:
    """`ValueError` unless `what` may replace the choice of a router, and nothing else does."""
    if "force" not in (getattr(router, "reads", None) or ()):
        raise ValueError(
            f"{what} cannot be used with {type(router).__name__}: must be a router with "
            "router.force, such as topk; with Megatron's own use --moe-enable-routing-replay and "
            "its RouterReplay")
    config = router.config
    for name, value, bound in (("force", config.force, "none"), (
            "second_expert_policy", config.second_expert_policy, "all")):
        if value != bound:
            raise ValueError(f"router.{name}={short(value)} does not fit {what}, which says what "
                             f"is chosen: must be {bound}; leave out one of the two")
    if router.forced is not None:
        raise ValueError(f"{what} does not fit {type(router).__name__}, whose choices are replayed "
                         "already: must be one of them; leave out the other")


def rollout(sample: Any, layers: int | None = None, top_k: int | None = None) -> Tensor:
    """The choices of a sample, int64 [T, L, K] on the host.

    Args:
        sample: an array or tensor of integers [T, L, K], or base64 of int32, as SGLang sends it.
        layers, top_k: L and K, for base64 alone, which has no shape.
    Raises:
        ValueError: another shape, no integers.
    """
    if isinstance(sample, (str, bytes)):
        if layers is None or top_k is None:
            raise ValueError(f"layers={layers}, top_k={top_k} for routed experts in base64: must "
                             "be those of the model, because the text has no shape; give both")
        numbers = torch.frombuffer(bytearray(base64.b64decode(sample)), dtype=torch.int32)
        if numbers.numel() % (layers * top_k):
            raise ValueError(
                f"routed experts have {numbers.numel()} numbers: must be a multiple of layers x "
                f"top_k = {layers} x {top_k}; give those of the model")
        return numbers.view(-1, layers, top_k).long()
    ids_TLK = torch.as_tensor(sample)
    if ids_TLK.dim() != 3 or ids_TLK.is_floating_point() or ids_TLK.dtype == torch.bool:
        raise ValueError(f"routed experts are {ids_TLK.dtype} {tuple(ids_TLK.shape)}: must be "
                         "integers [tokens, layers, top_k]; give a sample as the engine returns it")
    return ids_TLK.long().cpu()


def padded(samples: Sequence[Tensor], length: int, starts: Sequence[int] | None = None) -> Tensor:
    """Samples as a batch, int64 [B, S, L, K], -1 where they say nothing.

    Args:
        samples: of `rollout`.
        length: S, tokens of a sample with its padding.
        starts: place of each sample's first token, where padding is on the left; None: 0.
    """
    starts = starts or [0] * len(samples)
    for one in samples:
        if one.shape[1:] != samples[0].shape[1:]:
            raise ValueError(f"samples have [layers, top_k] {list(samples[0].shape[1:])} and "
                             f"{list(one.shape[1:])}: must be equal; give those of one model")
    batch = samples[0].new_full((len(samples), length, *samples[0].shape[1:]), -1)
    for row_SLK, ids_TLK, start in zip(batch, samples, starts, strict=True):
        if start + len(ids_TLK) > length:
            raise ValueError(
                f"a sample of {len(ids_TLK)} tokens from place {start} on does not fit "
                f"length={length}: must be at most that; cut samples as their tokens")
        row_SLK[start:start + len(ids_TLK)] = ids_TLK
    return batch


def packed(samples: Sequence[Tensor], lengths: Sequence[int]) -> Tensor:
    """Samples one after the other, int64 [1, S, L, K]; lengths: tokens of each in the batch, with
    the last one, which an engine has no choice for, and padding.
    """
    return torch.cat([padded([one], length)
                      for one, length in zip(samples, lengths, strict=True)], 1)


def tokens_of_rank(ids_BSLK: Tensor, *, sequence_first: bool = False,
                   context: tuple[int, int] = (0, 1), lengths: Sequence[int] | None = None,
                   sequence: tuple[int, int] = (0, 1)) -> Tensor:
    """The choices of the tokens that a layer of this rank sees, in its order, int64 [T, L, K].

    Args:
        sequence_first: tokens lie [S, B] (Megatron, fairseq), else [B, S].
        context: (rank, ranks) of context parallelism: of 2 x ranks equal parts of a sequence a rank
            has part `rank` and, counted from the end, part `rank`, as Megatron cuts them.
        lengths: of packed sequences, each of which is cut so; None: samples are not packed.
        sequence: (rank, ranks) of sequence parallelism: of what is left the rank's equal part.
    Raises:
        ValueError: a sequence cannot be cut so.
    """
    rank, ranks = context
    if ranks > 1:
        sequences = ids_BSLK.split(list(lengths), 1) if lengths else [ids_BSLK]
        for one in sequences:
            _check_parts("context", one.shape[1], 2 * ranks)
        parts = [one.chunk(2 * ranks, 1) for one in sequences]
        ids_BSLK = torch.cat([part for some in parts for part in (some[rank], some[-1 - rank])], 1)
    rank, ranks = sequence
    _check_parts("sequence", ids_BSLK.shape[1], ranks)
    ids_BSLK = ids_BSLK.chunk(ranks, 1)[rank]
    return (ids_BSLK.transpose(0, 1) if sequence_first else ids_BSLK).flatten(0, 1)


def _check_parts(name: str, tokens: int, parts: int) -> None:
    if tokens % parts:
        raise ValueError(f"a sequence of {tokens} tokens: must be a multiple of {parts} with this "
                         f"{name} parallelism; pad it as the batch is padded")


@contextmanager
def replay_rollouts(model: nn.Module, ids_TLK: Tensor,
                    layers: Sequence[int] | None = None) -> Iterator[None]:
    """While open, each layer of ours in `model` takes the experts that samples were generated with.

    In training and in evaluation: also a pass for log-probabilities replays. Keep it open until
    `backward` has returned; open it again for the next micro-batch. Choices are checked on the
    host: leave them there until then.

    Args:
        model: has routers of ours that can be forced (`router.force`), in the order of its layers.
        ids_TLK: of `tokens_of_rank`, on any device. Each pass of a layer is of these T tokens.
        layers: which of the L each layer takes; None: all, in their order. Engines differ in
            whether they count layers without experts, and a pipeline stage has some of them.
    Raises:
        ValueError: layers, experts, tokens or top-k that are not those of `ids_TLK`.
    """
    routers: list[nn.Module] = []
    for part in model.modules():
        if isinstance(part, RouterModule) and not any(part in router.modules()
                                                      for router in routers):
            routers.append(part)
    with replay_choices(routers, ids_TLK, layers):
        yield


@contextmanager
def replay_choices(routers: Sequence[nn.Module], ids_TLK: Tensor,
                   layers: Sequence[int] | None = None) -> Iterator[None]:
    """As `replay_rollouts`, with the routers of a model's layers."""
    for router in routers:
        check_replaceable(router, "replay_rollouts")
    choices = choices_of_layers(ids_TLK, layers, [router.num_experts for router in routers])
    try:
        for router, ids_TK in zip(routers, choices, strict=True):
            router.forced = _Rollout(ids_TK, router.select)
        yield
    finally:
        for router in routers:
            router.forced = None


def choices_of_layers(ids_TLK: Tensor, layers: Sequence[int] | None,
                      experts: Sequence[int]) -> list[Tensor]:
    """[T, K] of each layer with so many experts; arguments and errors: see `replay_rollouts`."""
    if layers is None and ids_TLK.shape[1] != len(experts):
        raise ValueError(
            f"routed experts have {ids_TLK.shape[1]} layers, the model here has {len(experts)} "
            "with experts: must be equal; say which of them each takes by `layers`")
    places = list(range(len(experts))) if layers is None else list(layers)
    if len(places) != len(experts) or not all(0 <= p < ids_TLK.shape[1] for p in places):
        raise ValueError(f"layers={short(places)}: must be {len(experts)} numbers in "
                         f"0..{ids_TLK.shape[1] - 1}, one for each layer with experts")
    choices = [ids_TLK[:, place] for place in places]
    for ids_TK, count in zip(choices, experts, strict=True):
        if ids_TK.numel() and not -1 <= int(ids_TK.min()) <= int(ids_TK.max()) < count:
            raise ValueError(f"routed experts are {int(ids_TK.min())}..{int(ids_TK.max())}: must "
                             f"be in -1..{count - 1}; give those of this model")
        sorted_TK = ids_TK.sort(1).values
        if bool(((sorted_TK[:, 1:] == sorted_TK[:, :-1]) & (sorted_TK[:, :1] >= 0)).any()):
            raise ValueError("routed experts have the same expert twice for a token: must be "
                             "different ones; -1 where the engine has none")
    return choices


def check_tokens(ids_TK: Tensor, tokens: int, top_k: int) -> None:
    """`ValueError` unless a pass of a layer has the tokens and experts per token of a rollout."""
    if tuple(ids_TK.shape) != (tokens, top_k):
        raise ValueError(
            f"a layer has a pass of {tokens} tokens and {top_k} experts each, and routed experts "
            f"are of {tuple(ids_TK.shape)}: must be equal; cut them as the batch is "
            "(tokens_of_rank), and open replay_rollouts for each micro-batch")


@dataclass
class _Rollout:
    """Chooses what a rollout says; see `Router.forced`."""

    ids_TK: Tensor
    select: Callable[[RoutingCall], Tensor]

    def __post_init__(self) -> None:
        self.complete = not bool((self.ids_TK < 0).any())

    def __call__(self, call: RoutingCall) -> Tensor:
        check_tokens(self.ids_TK, call.logits_TE.shape[0], call.k)
        ids_TK = self.ids_TK = self.ids_TK.to(call.logits_TE.device)
        if self.complete:
            return ids_TK
        return torch.where((ids_TK < 0).any(1, keepdim=True), self.select(call), ids_TK)
