"""Run the passes of a pipeline stage in a given order. Megatron's own functions for single passes
run each pass.

This module also does the remaining work of Megatron's
`forward_backward_pipelining_without_interleaving`. For example, this module collects losses and
token counts, delays gradient reductions, and finalizes the gradients.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state as ps
from torch import Tensor

from moe_plugin.comm.host_collectives import comm_of, named
from moe_plugin.hosts.megatron.compat import core
from moe_plugin.hosts.megatron.compat.names import schedules
from moe_plugin.planner.pipeline.schedules import order, warm_up
from moe_plugin.utils.machine import wait_for_device

# number of receives that are posted in advance, so that transfers continue while a stage computes;
# gloo transfers data only into posted receives
AHEAD = 2


class Receiver:
    """Receives the tensors that a neighbouring stage sends in one direction, in the order in which
    they are sent.

    Receive operations are posted ahead of time, so that a tensor can arrive while earlier tensors
    are processed.
    """

    def __init__(self, source: int, shapes: list[tuple[int, ...]], empty: Callable[..., Tensor],
                 group: Any, tag: int, what: str) -> None:
        self.source, self.group, self.tag, self.what = source, group, tag, what
        self._shapes, self._empty = deque(shapes), empty
        self._posted: deque[tuple[Tensor, Any]] = deque()
        self._post()

    def _post(self) -> None:
        while self._shapes and len(self._posted) < AHEAD:
            tensor = self._empty(self._shapes.popleft())
            work = dist.irecv(tensor, self.source, group=self.group, tag=self.tag)
            self._posted.append((tensor, work))

    def next(self) -> Tensor:
        """Wait for the next tensor and return it."""
        tensor, work = self._posted.popleft()
        with named(f"receive of {self.what}", self.group):
            work.wait()
        self._post()
        return tensor


class Sender:
    """Sends tensors asynchronously to a neighbouring stage in one direction.

    Each tensor is kept in memory until it has been sent.
    """

    def __init__(self, target: int, group: Any, tag: int, what: str) -> None:
        self.target, self.group, self.tag, self.what = target, group, tag, what
        self._leaving: deque[tuple[Tensor, Any]] = deque()

    def send(self, tensor: Tensor) -> None:
        """Start sending a tensor, which must not be modified before `finish` returns."""
        kept = tensor.detach().contiguous()
        work = dist.isend(kept, self.target, group=self.group, tag=self.tag)
        self._leaving.append((kept, work))
        while self._leaving and self._leaving[0][1].is_completed():
            self._wait()

    def finish(self) -> None:
        """Wait until all tensors have been sent."""
        while self._leaving:
            self._wait()

    def _wait(self) -> None:
        with named(f"send of {self.what}", self.group):
            self._leaving.popleft()[1].wait()


class Links:
    """The connections of a pipeline stage to its two neighbours during one step. Activations are
    sent to the next stage, and gradients are sent to the previous stage.

    Args:
        group: process group of the pipeline stages, in pipeline order.
        backward_group: second process group with the same ranks, for gradients. NCCL runs all
            transfers of a group one after another. If both directions used the same group, they
            could deadlock.
        received: list of the shapes of the activations that arrive from the previous stage, in
            order of arrival.
        sent: list of the shapes of the gradients that arrive from the next stage, in order of
            arrival. The activations that this stage sends have the same shapes as these gradients.
        dtype: dtype of the transferred tensors.
        device: device of the transferred tensors.
    """

    def __init__(self, group: Any, backward_group: Any, received: list[tuple[int, ...]],
                 sent: list[tuple[int, ...]], dtype: torch.dtype, device: torch.device) -> None:
        self.group = group
        stage, stages = group.rank(), group.size()

        def empty(shape: tuple[int, ...]) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        before = dist.get_global_rank(group, stage - 1) if stage else None
        after = dist.get_global_rank(group, stage + 1) if stage < stages - 1 else None
        activations, gradients = "a stage's activations", "a stage's gradients"
        # new tags for every step, so that messages left over from a failed step are not received
        # by a later step
        forth = comm_of(group).state.next_tag(2)
        back = forth + 1
        self.inputs = before is not None and Receiver(before, received, empty, group, forth,
                                                      activations)
        self.input_grads = before is not None and Sender(before, backward_group, back, gradients)
        self.outputs = after is not None and Sender(after, group, forth, activations)
        self.output_grads = after is not None and Receiver(after, sent, empty, backward_group, back,
                                                           gradients)

    def finish(self) -> None:
        """Wait until all tensors have been sent."""
        for sender in (self.outputs, self.input_grads):
            if sender:
                sender.finish()


Shape = tuple[int, ...]
TRIES = 2  # number of measurements of a transfer


class Step:
    """One training step of a pipeline stage.

    Args:
        passes: keyword arguments that Megatron passes to its forward-backward functions. `model`
            and `data_iterator` must be a single object, or a list with one object.
        config: Megatron's `TransformerConfig`.
        group: process group of the pipeline stages.
        gradients: process group for transferring gradients. See `PipelineSchedule`.
        mode: name of the order in which the passes run. See `planner.pipeline.schedules`.
    Attributes:
        slices: lengths of the slices of a sequence, in tokens. In the base class `Step`, the only
            slice is the whole sequence.
    """

    slices: tuple[int, ...] = (0,)

    def __init__(self, passes: dict[str, Any], config: Any, group: Any, gradients: Any,
                 mode: str = "overlapped") -> None:
        self.passes, self.config, self.mode = passes, config, mode
        self.model, self.data = (_only(passes[name]) for name in ("model", "data_iterator"))
        self.stage, self.stages = group.rank(), group.size()
        self.batches: int = passes["num_microbatches"]
        self.logged: list[Any] = []
        self.device = next(self.model.parameters()).device
        self.tokens = torch.zeros([], dtype=torch.int, device=self.device)
        self.alive: deque[tuple[Tensor | None, Tensor]] = deque()
        self.most_alive = 0
        self.links = Links(group, gradients, *self.travelling(), config.pipeline_dtype, self.device)

    def travelling(self) -> tuple[list[Shape], list[Shape]]:
        """Return two lists: the shapes of the activations and the shapes of the gradients that this
        stage receives.

        Both lists are in the order in which the passes run.
        """
        received, sent = self.shapes()
        return [received] * self.batches, [sent] * self.batches

    def shapes(self) -> tuple[Shape, Shape]:
        """Return the shape [s, B, h] of the activations that the stage receives for each
        micro-batch, and the shape of the activations that it sends.
        """
        shapes = core.call_supported(
            schedules.get_tensor_shapes, seq_length=self.passes["seq_length"],
            micro_batch_size=self.passes["micro_batch_size"],
            decoder_seq_length=self.passes.get("decoder_seq_length"), config=self.config,
            tp_group=ps.get_tensor_model_parallel_group(), cp_group=ps.get_context_parallel_group())
        adjust = self.passes.get("adjust_tensor_shapes_fn")
        received, sent = (shapes, shapes) if adjust is None else adjust(shapes, shapes)
        return tuple(received[0]), tuple(sent[0])

    def run(self) -> list[Any]:
        """Run every pass, finalize the gradients, and return the losses of the last stage."""
        # gradients are not reduced until this context is closed in `reducing`
        self.held_back = (self.config.no_sync_func or contextlib.nullcontext)()
        self.held_back.__enter__()
        for direction, batch, number in order(self.stages, self.stage, self.batches, self.mode,
                                              slices=len(self.slices)):
            (self.forward if direction == "forward" else self.backward)(batch, number)
        self.links.finish()
        self._finish_gradients()
        return self.logged

    @contextlib.contextmanager
    def reducing(self, last: bool) -> Iterator[None]:
        """Run a backward pass in this context, which reduces gradients only in the last pass."""
        sync = self.config.grad_sync_func
        # with a grad_sync_func, stages other than the first reduce after their last pass
        at_once = sync is None or self.stage == 0
        if last and at_once:
            self.held_back.__exit__(None, None, None)
        yield
        if last and not at_once:
            self.held_back.__exit__(None, None, None)
            sync(self.model.parameters())

    def forward(self, batch: int, number: int) -> None:
        """Run the forward pass of a micro-batch and start sending its output."""
        taken = self.links.inputs.next().requires_grad_() if self.links.inputs else None
        full = self.config.num_microbatches_with_partial_activation_checkpoints
        window = warm_up(self.stages, self.stage, self.batches, self.mode)
        output, tokens = schedules.forward_step(
            self.passes["forward_step_func"], self.data, self.model, self.batches, taken,
            self.logged, self.config, cp_group_size=ps.get_context_parallel_world_size(),
            collect_non_loss_data=self.passes.get("collect_non_loss_data", False),
            checkpoint_activations_microbatch=(None if full is None
                                               else batch % window >= full),
            is_first_microbatch=batch == 0, current_microbatch=batch,
            is_last_stage=self.stage == self.stages - 1)
        self.tokens += tokens.to(self.device)
        self.alive.append((taken, output))
        self.most_alive = max(self.most_alive, len(self.alive))
        if self.links.outputs:
            self.links.outputs.send(output)
            schedules.deallocate_output_tensor(output, self.config.deallocate_pipeline_outputs)

    def backward(self, batch: int, number: int) -> None:
        """Run the backward pass of a micro-batch and start sending the input's gradient."""
        taken, output = self.alive.popleft()
        grad = self.links.output_grads.next() if self.links.output_grads else None
        with self.reducing(batch == self.batches - 1):
            taken_grad = core.call_supported(
                schedules.backward_step, input_tensor=taken, output_tensor=output,
                output_tensor_grad=grad, model_type=None, config=self.config)
            if self.links.input_grads:
                self.links.input_grads.send(taken_grad)
            self.finish_backward()

    def finish_backward(self) -> None:
        """Finish a backward pass after the gradient of the stage's input has been sent. The base
        class `Step` has nothing left to do at this point.
        """

    def _finish_gradients(self) -> None:
        """Reduce gradients over replicas, and between stages that share embeddings."""
        finalize = self.config.finalize_model_grads_func
        if finalize is not None:
            tokens = self.tokens if self.config.calculate_per_token_loss else None
            given = {name: self.passes[name] for name in ("pg_collection", "force_all_reduce")
                     if name in self.passes}
            core.call_supported(functools.partial(finalize, [self.model], tokens), **given)


def _only(value: Any) -> Any:
    if not isinstance(value, list):
        return value
    [value] = value
    return value


def transfer_s(step: Step, shape: Shape) -> float:
    """Measure the time of sending a tensor between neighbouring stages. Return half the time of the
    fastest round trip, in seconds.

    This is a collective operation, so all pipeline stages must call this function. Even and odd
    pairs of stages are measured separately, so that no stage takes part in two measurements.
    """
    group, worst = step.links.group, 0.0
    tensor = torch.zeros(shape, dtype=step.config.pipeline_dtype, device=step.device)
    for first in (0, 1):  # (0, 1), (2, 3), ...; then (1, 2), ...
        sends = (step.stage - first) % 2 == 0
        other = step.stage + 1 if sends else step.stage - 1
        if not 0 <= other < step.stages:
            continue
        peer, trips = dist.get_global_rank(group, other), []
        for _ in range(TRIES):
            start = time.perf_counter()
            with named("round trip between stages", group):
                for send in (sends, not sends):
                    (dist.send if send else dist.recv)(tensor, peer, group=group)
            wait_for_device(step.device)
            trips.append((time.perf_counter() - start) / 2)
        worst = max(worst, min(trips))
    return worst
