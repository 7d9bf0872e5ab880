"""Rollout routing replay (R3, arXiv 2510.11370). In training, the model uses the experts that the
inference engine chose.

About one in ten router choices differs between the inference engine that generated a sample and the
model that is trained on the sample. Inference engines therefore return the experts of each token,
and training uses these experts instead of the router's own choices. The current router computes the
weights of the experts that the inference engine chose. Gradients flow through the weights to the
router, as for any other choice.

    with replay_rollouts(model, tokens_of_rank(padded(samples, length))):
        loss = ...
        loss.backward()     # inside, so that recomputed layers choose the same experts again

A sample is an array [tokens, layers, K] that begins with the prompt, as returned by vLLM
(`CompletionOutput.routed_experts`) and SGLang (`meta_info["routed_experts"]`, base64 of int32). The
last token was generated but never processed, so the inference engine did not choose experts for it.
For the last token and for every choice of -1, the router itself chooses the experts.

Notation: T is the number of tokens, B the number of samples, S the number of tokens per padded
sample, L the number of layers with experts, and K the number of experts per token.
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


# `router.force: balance` replaces the choice of a router in every call, and nothing else. Let N be
# the number of real tokens in a rank's call and n = 0, ..., N-1 their numbers. Token n goes to the
# experts
#
#     (n + floor(j E / k)) mod E     for j = 0, ..., k-1
#
# These k experts are different, and spread evenly over all experts and therefore over as many
# ranks as possible. Each expert gets floor(N k / E) or ceil(N k / E) of a rank's choices. The
# choices are the same in every layer and call. Padding is ignored.
#
# * The weights are the router's weights for these experts: its scores, divided by their sum as
#   `router.normalize` requires, times `router.scaling`. Gradients flow through the weights to the
#   router and to the tokens as for any choice. The choice has no gradient, as always.
# * Losses use the forced choice and the router's own scores. An even load turns the load terms of
#   `switch`, `gshard`, `sequence` and `global_batch` into the constants 1/E. With a softmax these
#   losses are therefore 1 and have no gradient if E divides N k. The loss `z` does not change.
# * Biases (`sigmoid_bias`) count the forced choice, and do not move while the load is even.
#
# Megatron's `--moe-router-force-load-balancing` is different and implemented by Megatron: it uses
# random logits, which are even only on average, and also computes the weights from these logits.
def balanced(call: RoutingCall) -> Tensor:
    """Return the experts [T, K] that `router.force: balance` assigns to each token.

    For padding tokens, the returned int64 values are meaningless.
    """
    number_T = call.real_T.long().cumsum(0) - 1
    step_K = [j * call.experts // call.k for j in range(call.k)]
    return (number_T[:, None] + number_T.new_tensor(step_K)) % call.experts


def check_replaceable(router: nn.Module, what: str) -> None:
    """Raise a `ValueError` if the router's choices are not replaceable or already replaced."""
    if "force" not in (getattr(router, "reads", None) or ()):
        raise ValueError(
            f"Router {type(router).__name__} cannot be used with {what}. Use a router that reads "
            "router.force, such as topk. With Megatron's own router, use "
            "--moe-enable-routing-replay and its RouterReplay.")
    config: Any = router.config
    for name, value, bound in (("force", config.force, "none"), (
            "second_expert_policy", config.second_expert_policy, "all")):
        if value != bound:
            raise ValueError(f"router.{name}={short(value)} cannot be combined with {what}, which "
                             f"replaces the router's choice. Set router.{name} to {bound}, or "
                             f"remove {what}.")
    if router.forced is not None:
        raise ValueError(f"The choices of router {type(router).__name__} are already being "
                         f"replayed, so {what} cannot be applied. Use only one replay at a time.")


def rollout(sample: Any, layers: int | None = None, top_k: int | None = None) -> Tensor:
    """Return the experts chosen in a sample as an int64 tensor [T, L, K] on the host.

    Args:
        sample: array or tensor of integers [T, L, K], or SGLang's base64 string of int32 numbers.
        layers, top_k: number of layers, L, and number of experts per token, K. Both numbers are
            required only for a base64 string, because the string does not contain its shape.
    Raises:
        ValueError: If the sample has an unexpected shape or does not contain integers.
    """
    if isinstance(sample, (str, bytes)):
        if layers is None or top_k is None:
            raise ValueError(f"Routed experts in base64 need layers and top_k, but layers={layers} "
                             f"and top_k={top_k} were passed. Pass both numbers of the model, "
                             "because the string contains no shape.")
        numbers = torch.frombuffer(bytearray(base64.b64decode(sample)), dtype=torch.int32)
        if numbers.numel() % (layers * top_k):
            raise ValueError(
                f"The routed experts have {numbers.numel()} numbers, which is not a multiple of "
                f"layers * top_k = {layers} * {top_k}. Pass the layers and top_k of the model that "
                "generated the sample.")
        return numbers.view(-1, layers, top_k).long()
    ids_TLK = torch.as_tensor(sample)
    if ids_TLK.dim() != 3 or ids_TLK.is_floating_point() or ids_TLK.dtype == torch.bool:
        raise ValueError(f"The routed experts have dtype {ids_TLK.dtype} and shape "
                         f"{tuple(ids_TLK.shape)}, but must be integers [tokens, layers, top_k]. "
                         "Pass the sample as the engine returned it.")
    return ids_TLK.long().cpu()


def padded(samples: Sequence[Tensor], length: int, starts: Sequence[int] | None = None) -> Tensor:
    """Combine samples into a padded batch, int64 [B, S, L, K]. Missing choices are -1.

    Args:
        samples: tensor returned by `rollout` for each sample.
        length: number of tokens per sample, including padding, S.
        starts: position of the first token of each sample. The position is greater than 0 if
            samples are padded on the left. Defaults to 0.
    """
    starts = starts or [0] * len(samples)
    for sample in samples:
        if sample.shape[1:] != samples[0].shape[1:]:
            raise ValueError(f"The samples differ in [layers, top_k]: {list(samples[0].shape[1:])} "
                             f"and {list(sample.shape[1:])}. Pass samples of a single model.")
    batch = samples[0].new_full((len(samples), length, *samples[0].shape[1:]), -1)
    for row_SLK, ids_TLK, start in zip(batch, samples, starts, strict=True):
        if start + len(ids_TLK) > length:
            raise ValueError(
                f"A sample of {len(ids_TLK)} tokens that starts at position {start} exceeds "
                f"length={length}. Truncate the routed experts like the tokens of the sample.")
        row_SLK[start:start + len(ids_TLK)] = ids_TLK
    return batch


def packed(samples: Sequence[Tensor], lengths: Sequence[int]) -> Tensor:
    """Concatenate samples to a single sequence, int64 [1, S, L, K].

    lengths: number of tokens of each sample in the batch. The number of tokens includes padding and
        the last token, for which the inference engine has no choice.
    """
    return torch.cat([padded([sample], length)
                      for sample, length in zip(samples, lengths, strict=True)], 1)


def tokens_of_rank(ids_BSLK: Tensor, *, sequence_first: bool = False,
                   context: tuple[int, int] = (0, 1), lengths: Sequence[int] | None = None,
                   sequence: tuple[int, int] = (0, 1)) -> Tensor:
    """Return the chosen experts, int64 [T, L, K], of the tokens that a layer on this rank
    processes, in the order of these tokens.

    Args:
        ids_BSLK: chosen experts of a whole batch; see `padded` and `packed`.
        sequence_first: True if tokens are ordered [S, B] (Megatron, fairseq). By default, tokens
            are ordered [B, S].
        context: pair (rank, ranks) for context parallelism. Each sequence is split into 2 * ranks
            equal parts. As in Megatron, a rank processes two of the 2 * ranks parts: the part with
            index `rank`, counted from the start, and the part with index `rank`, counted from the
            end.
        lengths: lengths of the packed sequences, or None if samples are not packed. Each packed
            sequence is split separately.
        sequence: pair (rank, ranks) for sequence parallelism, which splits the remaining tokens
            into equal parts.
    Raises:
        ValueError: If a sequence cannot be split into equal parts.
    """
    rank, ranks = context
    if ranks > 1:
        sequences = ids_BSLK.split(list(lengths), 1) if lengths else [ids_BSLK]
        for sequence_SLK in sequences:
            check_parts("context", sequence_SLK.shape[1], 2 * ranks)
        # Early parts need less causal attention than late ones, so a rank gets one of each.
        parts = [sequence_SLK.chunk(2 * ranks, 1) for sequence_SLK in sequences]
        ids_BSLK = torch.cat([part for some in parts for part in (some[rank], some[-1 - rank])], 1)
    rank, ranks = sequence
    check_parts("sequence", ids_BSLK.shape[1], ranks)
    ids_BSLK = ids_BSLK.chunk(ranks, 1)[rank]
    return (ids_BSLK.transpose(0, 1) if sequence_first else ids_BSLK).flatten(0, 1)


def check_parts(name: str, tokens: int, parts: int) -> None:
    """Raise a `ValueError` if a sequence cannot be split into equal parts.

    Args:
        name: type of parallelism that splits the sequence, for use in the error message.
        tokens: number of tokens of the sequence.
        parts: number of parts.
    """
    if tokens % parts:
        raise ValueError(f"A sequence of {tokens} tokens cannot be split into {parts} equal "
                         f"parts, as this {name} parallelism requires. Pad the routed experts like "
                         "the tokens of the batch.")


@contextmanager
def replay_rollouts(model: nn.Module, ids_TLK: Tensor,
                    layers: Sequence[int] | None = None) -> Iterator[None]:
    """Within this context, let each layer of `model` use the experts that were chosen when the
    samples were generated.

    The experts are replaced both in training and in evaluation, for example in a pass that computes
    log-probabilities. Keep the context open until `backward` has returned, and open a new context
    for the next micro-batch. The choices are checked on the host. Keep the tensor in host memory
    until it has been passed to this function.

    Args:
        model: model whose routers read `router.force`. Layers are matched in module order.
        ids_TLK: tensor returned by `tokens_of_rank`, on any device. Each forward pass of a layer
            must process exactly the T tokens of `ids_TLK`.
        layers: for each layer of the model, the index of its recording among the L recorded layers.
            By default, all recorded layers are used in order. Pass `layers` if an inference engine
            also counts layers without experts, or if a pipeline stage contains only some layers.
    Raises:
        ValueError: If the layers, experts, tokens or top_k do not match `ids_TLK`.
    """
    routers: list[nn.Module] = []
    for part in model.modules():
        if isinstance(part, RouterModule) and not any(part in router.modules()
                                                      for router in routers):
            routers.append(part)
    with replay_choices(routers, ids_TLK, layers):
        yield


@contextmanager
def replay_choices(routers: Sequence[Any], ids_TLK: Tensor,
                   layers: Sequence[int] | None = None) -> Iterator[None]:
    """Replay choices in a list of routers, as `replay_rollouts` does for a model."""
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
    """Return the chosen experts [T, K] for each layer. The arguments and errors are the same as for
    `replay_rollouts`.

    experts: number of experts in each layer.
    """
    if layers is None and ids_TLK.shape[1] != len(experts):
        raise ValueError(
            f"The routed experts have {ids_TLK.shape[1]} layers, but this model has {len(experts)} "
            "layers with experts. Use `layers` to select one recorded layer for each of them.")
    places = list(range(len(experts))) if layers is None else list(layers)
    if len(places) != len(experts) or not all(0 <= p < ids_TLK.shape[1] for p in places):
        raise ValueError(f"layers={short(places)} must contain {len(experts)} numbers in "
                         f"0..{ids_TLK.shape[1] - 1}, one for each layer with experts.")
    choices = [ids_TLK[:, index] for index in places]
    for ids_TK, count in zip(choices, experts, strict=True):
        if ids_TK.numel() and not -1 <= int(ids_TK.min()) <= int(ids_TK.max()) < count:
            raise ValueError(f"The routed experts are in {int(ids_TK.min())}..{int(ids_TK.max())}, "
                             f"but must be in -1..{count - 1}. Pass the samples of this model.")
        # After sorting, equal experts are neighbours; equal values of -1 are allowed.
        sorted_TK = ids_TK.sort(1).values
        if bool(((sorted_TK[:, 1:] == sorted_TK[:, :-1]) & (sorted_TK[:, :1] >= 0)).any()):
            raise ValueError("The routed experts contain the same expert twice for a token. The "
                             "experts of a token must differ; use -1 for a missing choice.")
    return choices


def check_tokens(ids_TK: Tensor, tokens: int, top_k: int, by: str = "replay_rollouts") -> None:
    """Raise a `ValueError` if the number of tokens or of experts per token does not match.

    by: name of the function that passed the choices, for use in the error message.
    """
    if tuple(ids_TK.shape) != (tokens, top_k):
        raise ValueError(
            f"A layer processes {tokens} tokens with {top_k} experts each, but the routed experts "
            f"have shape {tuple(ids_TK.shape)}. Split them like the batch (tokens_of_rank), and "
            f"use {by} for each micro-batch.")


@dataclass
class _Rollout:
    """A callable that returns the choices recorded in a rollout; see `Router.forced`."""

    ids_TK: Tensor
    select: Callable[[RoutingCall], Tensor]

    def __post_init__(self) -> None:
        self.complete = not bool((self.ids_TK < 0).any())

    def __call__(self, call: RoutingCall) -> Tensor:
        check_tokens(self.ids_TK, call.logits_TE.shape[0], call.k)
        ids_TK = self.ids_TK = self.ids_TK.to(call.logits_TE.device)
        if self.complete:
            return ids_TK
        # The router replaces all choices of such a token, because a single replaced choice could
        # repeat an expert.
        return torch.where((ids_TK < 0).any(1, keepdim=True), self.select(call), ids_TK)
