"""Run the passes of a pipeline stage slice by slice. The forward passes process the slices in
order, and the backward passes process them in reverse order.

Before computing the loss, the last stage concatenates the outputs of all slices of a micro-batch.
The script's loss function therefore receives the same tensors as without slices.
"""

from __future__ import annotations

import inspect
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from moe_plugin.hosts.megatron.compat import aux_losses, core
from moe_plugin.hosts.megatron.compat.names import Attention, schedules
from moe_plugin.hosts.megatron.compat.settings import setting
from moe_plugin.hosts.megatron.layer import plugin_layers
from moe_plugin.hosts.megatron.pipeline.attention import Sequences, SliceAttention, SlicePart
from moe_plugin.hosts.megatron.pipeline.base import refuse, values_of_schedule
from moe_plugin.hosts.megatron.pipeline.executor import Shape, Step
from moe_plugin.hosts.megatron.refusals import SLICES
from moe_plugin.layer import layers_in
from moe_plugin.utils.machine import wait_for_device

NAME = "terapipe"
_BY_TOKENS = ("input_ids", "position_ids", "labels", "loss_mask", "padding_mask")  # [B, S]
_NOT_CUT = ("decoder_input", "inference_context", "inference_params", "packed_seq_params")


def check_model(model: Any, config: Any) -> Any:
    """Check that a GPT model supports slices, and return the model without its wrappers.

    Raises:
        ValueError: If a module of the model or one of Megatron's settings does not support slices.
    """
    SLICES.refuse(values_of_schedule(NAME, config))
    bare = core.bare(model)
    positions = getattr(bare, "position_embedding_type", None)  # of GPT models
    if positions not in ("learned_absolute", "rope", "none"):
        refuse(NAME, "position_embedding_type", positions,
               "'learned_absolute', 'rope' or 'none', of a GPT model",
               "use pipeline.schedule=1f1b")
    for module in bare.modules():
        if isinstance(module, Attention) and not isinstance(module.core_attention, SliceAttention):
            refuse(NAME, "core_attention", type(module.core_attention).__name__,
                   "SliceAttention in every layer",
                   "use --spec moe_plugin.hosts.megatron.spec moe_layer, or a spec from "
                   "moe_plugin.hosts.megatron.spec.swap_attention")
    recomputes = setting(config, "recompute_granularity") is not None
    for layer in layers_in(bare) if recomputes else []:
        router = layer.config.router
        for name, value in (("router.pre_gate", router.pre_gate),
                            ("router.predict", router.predict)):
            if value:
                refuse(NAME, name, value, "off if activations are recomputed",
                       f"leave out --recompute-granularity or {name}")
    return bare


class CutModel:
    """Wrapper around a GPT model. The model is called with whole batches, but computes only one
    slice of the sequences.

    Inside the context `cutting`, the inputs are split into slices. `begin` selects the slice to
    compute.

    Args:
        bare: the model without its wrappers.
        length: length of each sequence, in tokens.
    """

    def __init__(self, bare: Any, length: int) -> None:
        self.bare, self.length = bare, length
        self.attentions = [m for m in bare.modules() if isinstance(m, SliceAttention)]
        self.moe_layers = plugin_layers(bare)
        self.part: SlicePart | None = None
        self._signature = inspect.signature(bare.forward)

    @contextmanager
    def cutting(self) -> Iterator[None]:
        """Inside the block, each call of the model computes the slice that `begin` has selected."""
        with ExitStack() as stack:
            hooks = [self.bare.register_forward_pre_hook(self._cut, with_kwargs=True, prepend=True)]
            if getattr(self.bare, "position_embedding_type", None) == "rope":
                hooks.append(self.bare.rotary_pos_emb.register_forward_pre_hook(
                    self._rotate, with_kwargs=True))
            for hook in hooks:
                stack.callback(hook.remove)
            stack.callback(self.begin, None)
            yield

    def begin(self, part: SlicePart | None) -> None:
        """Select the slice that the next forward or backward passes compute."""
        self.part = part
        for attention in self.attentions:
            attention.part = part
        for layer in self.moe_layers:
            layer.continues = part is not None and part.start > 0

    def _cut(self, _: nn.Module, args: tuple[Any, ...],
             kwargs: dict[str, Any]) -> tuple[tuple[()], dict[str, Any]]:
        given, part = self._signature.bind(*args, **kwargs).arguments, self.part
        assert part is not None
        for name in _NOT_CUT:
            if given.get(name) is not None:
                refuse(NAME, name, type(given[name]).__name__, "None", "use pipeline.schedule=1f1b")
        for name in _BY_TOKENS:
            if given.get(name) is not None:
                given[name] = self._cut_tokens(name, given[name], part)
        if "attention_mask" in given:  # attention layers get the mask from the slice
            part.sequences.mask, given["attention_mask"] = given["attention_mask"], None
        return (), {**given.pop("kwargs", {}), **given}

    def _cut_tokens(self, name: str, value_BS: Tensor, part: SlicePart) -> Tensor:
        if value_BS.shape[1] != self.length:
            refuse(NAME, f"{name}.shape[1]", value_BS.shape[1], f"seq_length={self.length}",
                   "use pipeline.schedule=1f1b for sequences of several lengths")
        return value_BS[:, part.start:part.start + part.length]

    def _rotate(self, _: nn.Module, args: tuple[Any, ...],
                kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        assert self.part is not None
        return args, {**kwargs, "offset": self.part.start}


class Again:
    """An iterator that returns the same item until `next_batch` is called."""

    def __init__(self, data: Any) -> None:
        self._data, self._fresh, self._item = data, True, None

    def next_batch(self) -> None:
        """Make the next call of `next` read a new item from the wrapped iterator."""
        self._fresh = True

    def __iter__(self) -> Again:
        return self

    def __next__(self) -> Any:
        if self._fresh:
            self._item, self._fresh = next(self._data), False
        return self._item


@contextmanager
def weighed(part: SlicePart) -> Iterator[None]:
    """Scale the auxiliary losses that are computed inside the block by the slice's share of the
    tokens in the sequence.

    This context manager scales only the logged values. `SliceStep` scales the gradients in the same
    way, unless Megatron itself weights losses by tokens.
    """
    share = part.length / part.sequences.length
    before = aux_losses.losses_so_far()
    yield
    for name, entry in aux_losses.logged_losses().items():
        start = before.get(name, 0 * entry.values)
        entry.values.copy_(start + share * (entry.values - start))


Seconds = dict[tuple[str, int, int], list[float]]  # by kind of pass, length and start of a slice


class SliceStep(Step):
    """One training step of a pipeline stage, computed slice by slice. `slices` contains the number
    of tokens in each slice.

    timed: True to measure the time of each pass. If True, the device is synchronized before and
        after each pass.

    Attributes:
        seconds: dict of the measured times of passes, in seconds.
    """

    def __init__(self, passes: dict[str, Any], config: Any, group: Any, gradients: Any,
                 slices: Sequence[int], timed: bool = False) -> None:
        self.slices, self.starts = tuple(slices), [0, *accumulate(slices)]
        super().__init__(passes, config, group, gradients)
        bare = check_model(self.model, config)
        self.cut = CutModel(bare, self.starts[-1])
        self.again = None if self.data is None else Again(self.data)
        self.batch_parts: dict[int, list[SlicePart]] = {}
        self.graphs: dict[tuple[int, int], tuple[Tensor | None, Tensor]] = {}
        self.loss_function: Callable[[Tensor], Any] | None = None
        self.output_grads: list[Tensor] = []
        self.timed = timed
        self.seconds: Seconds = defaultdict(list)

    def travelling(self) -> tuple[list[Shape], list[Shape]]:
        """Return the shapes of the activations and gradients that this stage receives. See `Step`.

        For each micro-batch, the gradients of the slices arrive in reverse order.
        """
        (length, *received), (_, *sent) = self.shapes()
        ranks = self.starts[-1] // length  # number of tensor-parallel ranks that share a sequence
        lengths = [part // ranks for part in self.slices]
        return ([(part, *received) for part in lengths] * self.batches,
                [(part, *sent) for part in lengths[::-1]] * self.batches)

    def run(self) -> list[Any]:
        """Run the step. See `Step`."""
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
        """Run the forward pass of one slice. Send the output to the next stage. On the last stage,
        compute the loss instead, once all slices are complete.
        """
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
        # the loss needs the outputs of all slices; its gradient is split into slices for their
        # backward passes, which follow
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
        assert whole_BS.grad is not None
        self.output_grads = list(whole_BS.grad.split(self.slices, dim=1))

    def backward(self, batch: int, number: int) -> None:
        """Run the backward pass of one slice, and send the gradient of the slice's input."""
        taken, output = self.graphs.pop((batch, number))
        part = self._begin(batch, number)
        grad = self.links.output_grads.next() if self.links.output_grads else None
        began = self._now()
        with self.reducing(batch == self.batches - 1 and number == 0), weighed(part):
            with aux_losses.scaled_losses(1.0 if self.config.calculate_per_token_loss
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

    def _took(self, direction: str, part: SlicePart, began: float) -> None:
        if self.timed:
            self.seconds[direction, part.length, part.start].append(self._now() - began)
