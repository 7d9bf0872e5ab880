"""Runs the passes of a stage slice by slice: forward in order, backward in reverse order.

The last stage puts the outputs of a micro-batch's slices together before it computes the loss, so
that any loss function of a host sees what it sees without slices.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from moe_plugin.hosts.megatron.compat import core
from moe_plugin.hosts.megatron.compat.names import schedules
from moe_plugin.hosts.megatron.compat.settings import setting
from moe_plugin.hosts.megatron.pipeline.attention import Sequences, SlicePart
from moe_plugin.hosts.megatron.pipeline.base import refuse
from moe_plugin.hosts.megatron.pipeline.cutting import (
    NAME,
    Again,
    CutModel,
    check_model,
    weighed,
)
from moe_plugin.hosts.megatron.pipeline.executor import Shape, Step
from moe_plugin.layer import layers_in
from moe_plugin.utils.machine import wait_for_device

Seconds = dict[tuple[str, int, int], list[float]]  # by kind, length and context of a slice


class SliceStep(Step):
    """One training step of a stage, in slices of so many tokens each, first to last.

    timed: measure passes; device work is awaited around each.

    Attributes:
        seconds: what was measured.
    """

    def __init__(self, passes: dict[str, Any], config: Any, group: Any, gradients: Any,
                 slices: Sequence[int], timed: bool = False) -> None:
        self.slices, self.starts = tuple(slices), [0, *accumulate(slices)]
        super().__init__(passes, config, group, gradients)
        bare = _checked(self.model, config)
        self.cut = CutModel(bare, self.starts[-1])
        self.again = None if self.data is None else Again(self.data)
        self.batch_parts: dict[int, list[SlicePart]] = {}
        self.graphs: dict[tuple[int, int], tuple[Tensor | None, Tensor]] = {}
        self.loss_function: Callable[[Tensor], Any] | None = None
        self.output_grads: list[Tensor] = []
        self.timed = timed
        self.seconds: Seconds = defaultdict(list)

    def travelling(self) -> tuple[list[Shape], list[Shape]]:
        """See `Step`; gradients come in reverse order of a micro-batch's slices."""
        (length, *received), (_, *sent) = self.shapes()
        ranks = self.starts[-1] // length  # tensor-parallel ones that share a sequence
        lengths = [part // ranks for part in self.slices]
        return ([(part, *received) for part in lengths] * self.batches,
                [(part, *sent) for part in lengths[::-1]] * self.batches)

    def run(self) -> list[Any]:
        """See `Step`."""
        try:
            with self.cut.cutting():
                return super().run()
        finally:
            self.batch_parts.clear()
            self.graphs.clear()

    def _begin(self, batch: int, number: int) -> SlicePart:
        if batch not in self.batch_parts:
            whole = Sequences(self.starts[-1], self.device)
            self.batch_parts[batch] = [
                SlicePart(whole, start, length)
                for start, length in zip(self.starts, self.slices, strict=False)]
        part = self.batch_parts[batch][number]
        self.cut.begin(part)
        return part

    def forward(self, batch: int, number: int) -> None:
        """The forward pass of a slice; its output is on its way, or the loss is known."""
        taken = self.links.inputs.next().requires_grad_() if self.links.inputs else None
        if self.again is not None and number == 0:
            self.again.next_batch()
        part, began = self._begin(batch, number), self._now()
        with weighed(part):
            output = self._output(batch, number, taken)
        self._took("forward", part, began)
        self.graphs[batch, number] = taken, output
        self.most_alive = max(self.most_alive, len(self.graphs))
        if self.links.outputs:
            self.links.outputs.send(output)
            schedules.deallocate_output_tensor(output, self.config.deallocate_pipeline_outputs)
        elif number == len(self.slices) - 1:
            self._loss(batch)

    def _output(self, batch: int, number: int, taken: Tensor | None) -> Tensor:
        def forward_step(*arguments: Any) -> Any:
            output, self.loss_function = self.passes["forward_step_func"](*arguments)
            return output, self.loss_function

        output, _ = core.call_supported(
            schedules.forward_step, forward_step_func=forward_step, data_iterator=self.again,
            model=self.model, num_microbatches=self.batches, input_tensor=taken,
            forward_data_store=self.logged, config=self.config, cp_group_size=1,
            is_first_microbatch=batch == number == 0, current_microbatch=batch,
            is_last_stage=False)
        return output

    def _loss(self, batch: int) -> None:
        # the loss of all slices, and its gradients by slice; their backward passes are next
        outputs = [self.graphs[batch, number][1].detach() for number in range(len(self.slices))]
        whole_BS = torch.cat(outputs, dim=1).requires_grad_()
        if self.config.timers is not None:
            self.config.timers("forward-compute", log_level=2).start()
        loss, tokens = core.call_supported(
            schedules.forward_step_calc_loss, model=self.model, output_tensor=whole_BS,
            loss_func=self.loss_function, config=self.config, vp_stage=None,
            collect_non_loss_data=self.passes.get("collect_non_loss_data", False),
            num_microbatches=self.batches, forward_data_store=self.logged, cp_group_size=1,
            is_last_stage=True)
        self.tokens += tokens.to(self.device)
        scale = self.config.grad_scale_func
        (loss if scale is None else scale(loss)).backward()
        self.output_grads = list(whole_BS.grad.split(self.slices, dim=1))

    def backward(self, batch: int, number: int) -> None:
        """The backward pass of a slice; its input's gradient is on its way."""
        taken, output = self.graphs.pop((batch, number))
        part = self._begin(batch, number)
        grad = self.links.output_grads.next() if self.links.output_grads else None
        began = self._now()
        with self.reducing(batch == self.batches - 1 and number == 0), weighed(part):
            with core.scaled_losses(1.0 if self.config.calculate_per_token_loss
                                    else part.length / part.sequences.length):
                if grad is not None:
                    taken_grad = core.call_supported(
                        schedules.backward_step, input_tensor=taken, output_tensor=output,
                        output_tensor_grad=grad, model_type=None, config=self.config)
                else:
                    torch.autograd.backward(output, self.output_grads.pop())
                    taken_grad = None if taken is None else taken.grad
            self._took("backward", part, began)
            if self.links.input_grads:
                self.links.input_grads.send(taken_grad)
        if number == 0:
            del self.batch_parts[batch]

    def _now(self) -> float:
        if self.timed:
            wait_for_device(self.device)
        return time.perf_counter()

    def _took(self, kind: str, part: SlicePart, began: float) -> None:
        if self.timed:
            self.seconds[kind, part.length, part.start].append(self._now() - began)


def check_slices(passes: dict[str, Any], config: Any) -> None:
    """`ValueError`: the model or a setting of Megatron does not fit slices."""
    [model] = passes["model"] if isinstance(passes["model"], list) else [passes["model"]]
    _checked(model, config)


def _checked(model: Any, config: Any) -> torch.nn.Module:
    bare = check_model(model, config)
    recomputes = setting(config, "recompute_granularity") is not None
    for layer in layers_in(bare) if recomputes else []:
        router = layer.config.router
        for name, value in (("router.pre_gate", router.pre_gate),
                            ("router.predict", router.predict)):
            if value:
                refuse(NAME, name, value, "off where activations are recomputed",
                       "leave out --recompute-granularity, or it")
    return bare
