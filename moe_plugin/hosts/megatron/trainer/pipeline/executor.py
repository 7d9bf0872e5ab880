"""Runs the passes of a stage in a given order, by Megatron's own functions for one pass.

What Megatron's `forward_backward_pipelining_without_interleaving` does around the
passes is done here too: losses, tokens, held back reductions, finished gradients.
"""

from __future__ import annotations

import contextlib
import functools
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moe_plugin.hosts.megatron.compat import core
from moe_plugin.hosts.megatron.compat.settings import plain_name, setting
from moe_plugin.hosts.megatron.trainer.pipeline.base import refuse
from moe_plugin.hosts.megatron.trainer.pipeline.links import Links
from moe_plugin.planner.pipeline.schedules import Pass

Shape = tuple[int, ...]
# settings of Megatron that its own schedules read and this one does not
_REFUSED = ("overlap_moe_expert_parallel_comm", "use_ring_exchange_p2p", "variable_seq_lengths",
            "mtp_standalone", "defer_embedding_wgrad_compute", "enable_cuda_graph",
            "fine_grained_activation_offloading", "moe_paged_stash", "delay_wgrad_compute")


def check_config(schedule: str, config: Any) -> None:
    """`ValueError` where a setting of Megatron does not fit a schedule of ours."""
    chunks = setting(config, "virtual_pipeline_model_parallel_size")
    if chunks is not None and chunks > 1:
        refuse(schedule, "virtual stages, num_virtual_stages_per_pipeline_rank", chunks, "left out",
               "virtual stages have Megatron's own interleaved schedule: use "
               "pipeline.schedule=1f1b, or leave them out")
    for name in _REFUSED:
        if setting(config, name, False):
            refuse(schedule, name, setting(config, name), "off",
                   "use pipeline.schedule=1f1b, or leave it out")
    graphs = plain_name(setting(config, "cuda_graph_impl", "none"))
    if graphs.lower() == "local":
        refuse(schedule, "cuda_graph_impl", graphs, "'none'",
               "use pipeline.schedule=1f1b, or leave it out")


def backward_group(group: Any) -> Any:
    """A second group of the same stages, for gradients; the group itself under gloo, which keeps
    directions apart by tags. Collective over all ranks.
    """
    if dist.get_backend(group) != "nccl":
        return group
    mine: list[int] = dist.get_process_group_ranks(group)
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, mine)
    groups = {tuple(ranks): dist.new_group(ranks) for ranks in sorted(set(map(tuple, every)))}
    return groups[tuple(mine)]


class Step:
    """One training step of a stage.

    Args:
        passes: keyword arguments of Megatron's forward-backward functions; `model` and
            `data_iterator` are a single one, or a list of one.
        config: Megatron's. group: the stages. gradients: see `backward_group`.
        window: micro-batches whose backward has not begun at a time, at most.
    """

    def __init__(self, passes: dict[str, Any], config: Any, group: Any, gradients: Any,
                 window: int) -> None:
        self.passes, self.config, self.window = passes, config, window
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
        """Shapes of the activations received, and of the gradients received for those sent; both
        in the order of the passes.
        """
        received, sent = self.shapes()
        return [received] * self.batches, [sent] * self.batches

    def shapes(self) -> tuple[Shape, Shape]:
        """Shapes [s, B, h] of a micro-batch's activations, received and sent."""
        from megatron.core import parallel_state as ps

        from moe_plugin.hosts.megatron.compat.names import schedules

        shapes = core.call_supported(
            schedules.get_tensor_shapes, seq_length=self.passes["seq_length"],
            micro_batch_size=self.passes["micro_batch_size"],
            decoder_seq_length=self.passes.get("decoder_seq_length"), config=self.config,
            tp_group=ps.get_tensor_model_parallel_group(), cp_group=ps.get_context_parallel_group())
        adjust = self.passes.get("adjust_tensor_shapes_fn")
        received, sent = (shapes, shapes) if adjust is None else adjust(shapes, shapes)
        return tuple(received[0]), tuple(sent[0])

    def run(self, order: Sequence[Pass]) -> list[Any]:
        """All passes in this order, each once; what the loss function logged, on the last stage."""
        held_back = self.hold_back()
        for kind, batch, _ in order:
            if kind == "forward":
                self.forward(batch)
            else:
                self.backward(batch, held_back)
        self.links.finish()
        return self.logged

    def hold_back(self) -> Any:
        """Gradients are not reduced until what this returns is left."""
        held_back = (self.config.no_sync_func or contextlib.nullcontext)()
        held_back.__enter__()
        return held_back

    @contextlib.contextmanager
    def reducing(self, last: bool, held_back: Any) -> Iterator[None]:
        """A backward pass; from the last one on gradients are reduced."""
        sync = self.config.grad_sync_func
        # with a function for it, stages but the first reduce when they have nothing else to do
        at_once = sync is None or self.stage == 0
        if last and at_once:
            held_back.__exit__(None, None, None)
        yield
        if last and not at_once:
            held_back.__exit__(None, None, None)
            sync(self.model.parameters())

    def forward(self, batch: int) -> None:
        """The forward pass of a micro-batch; its output is on its way."""
        from megatron.core import parallel_state as ps

        from moe_plugin.hosts.megatron.compat.names import schedules

        taken = self.links.inputs.next().requires_grad_() if self.links.inputs else None
        full = self.config.num_microbatches_with_partial_activation_checkpoints
        output, tokens = schedules.forward_step(
            self.passes["forward_step_func"], self.data, self.model, self.batches, taken,
            self.logged, self.config, cp_group_size=ps.get_context_parallel_world_size(),
            collect_non_loss_data=self.passes.get("collect_non_loss_data", False),
            checkpoint_activations_microbatch=(None if full is None
                                               else batch % self.window >= full),
            is_first_microbatch=batch == 0, current_microbatch=batch,
            is_last_stage=self.stage == self.stages - 1)
        self.tokens += tokens.to(self.device)
        self.alive.append((taken, output))
        self.most_alive = max(self.most_alive, len(self.alive))
        if self.links.outputs:
            self.links.outputs.send(output)
            schedules.deallocate_output_tensor(output, self.config.deallocate_pipeline_outputs)

    def backward(self, batch: int, held_back: Any) -> None:
        """The backward pass of a micro-batch; its input's gradient is on its way."""
        from moe_plugin.hosts.megatron.compat.names import schedules

        taken, output = self.alive.popleft()
        grad = self.links.output_grads.next() if self.links.output_grads else None
        with self.reducing(batch == self.batches - 1, held_back):
            taken_grad = core.call_supported(
                schedules.backward_step, input_tensor=taken, output_tensor=output,
                output_tensor_grad=grad, model_type=None, config=self.config)
            if self.links.input_grads:
                self.links.input_grads.send(taken_grad)

    def finish_gradients(self) -> None:
        """Megatron's reductions over replicas and between the stages that share embeddings."""
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
