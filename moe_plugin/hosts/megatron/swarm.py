"""Support for `--swarm` in Megatron's own training loop. The pipeline stages of a GPT model are
computed by peers, which can join and leave at any time.

Trainers are the processes that run the training loop. A trainer reads data, sets learning rates,
and writes logs and checkpoints. A trainer stores no weights. To start a peer, run the same command
with `--swarm peer`. A peer builds the layers of one stage in the same way as Megatron builds a
pipeline stage. The peer computes these layers with the script's own forward step, on micro-batches
that a trainer has read.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import logging
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from torch import Tensor, nn

from moe_plugin.config import SwarmConfig, run_config
from moe_plugin.hosts.megatron import checkpoint_files as files
from moe_plugin.hosts.megatron.compat import aux_losses, core, cpu
from moe_plugin.hosts.megatron.compat.settings import script_arguments
from moe_plugin.hosts.megatron.layer import plugin_layers
from moe_plugin.hosts.megatron.model_settings import model_settings, read_progress
from moe_plugin.hosts.megatron.refusals import SWARM, values_of
from moe_plugin.hosts.megatron.run import tracker_states
from moe_plugin.hosts.megatron.script_features import begin, progress_of, stages_of
from moe_plugin.hosts.megatron.streamed import MakePart, numbered, own_randomness, refuse_token_ids
from moe_plugin.hosts.megatron.streamed_optimizer import (
    StreamedOptimizer,
    device_of_parts,
    torch_optimizer,
)
from moe_plugin.hosts.megatron.translate import settings_from_flags
from moe_plugin.training.resilience.swarm import JoinedTrainer, StagePeer, Swarm
from moe_plugin.training.run import Run
from moe_plugin.utils import checksums
from moe_plugin.utils.regular_files import check_input, write_whole

logger = logging.getLogger("moe_plugin.megatron")
META = "megatron.json"
ForwardStep = Callable[..., tuple[Tensor, Callable[[Tensor], Any]]]


class SwarmStage(nn.Module):
    """A pipeline stage on a peer. The stage applies the script's forward step to its layers.

    Args:
        part: pipeline stage that Megatron has built.
        forward_step: the script's forward step function.
    """

    def __init__(self, part: nn.Module, forward_step: ForwardStep) -> None:
        super().__init__()
        self.part: Any = part
        self.forward_step = forward_step
        self.loss: Callable[[Tensor], Any] | None = None

    def forward(self, x: Tensor, batch: dict[str, Tensor]) -> Tensor:
        """Compute the stage.

        x: output [T, B, D] of the previous stage. The first stage ignores `x`.
        Returns: a tensor [T, B, D]. The last stage returns the input of the script's loss function.
        """
        if not self.part.pre_process:
            self.part.set_input_tensor(x)
        try:
            with own_randomness():
                output, self.loss = self.forward_step(iter([dict(batch)]), self.part)
            return output
        finally:
            self.part.set_input_tensor(None)


class MegatronPeer(StagePeer):
    """A peer that processes each request in a separate thread, on the device of this process."""

    def _answer(self, request: dict[str, Any]) -> dict[str, Any] | None:
        # `cpu.building`, which maps "cuda" to "cpu", applies only to the thread that enters it
        with cpu.building() if cpu.enabled() else contextlib.nullcontext():
            return super()._answer(request)


def serve(swarm: SwarmConfig, args: argparse.Namespace, make: MakePart, forward_step: ForwardStep
          ) -> None:
    """Serve requests for one stage until the trainer ends or can no longer be reached."""
    count = args.global_batch_size // args.micro_batch_size
    made: list[SwarmStage] = []

    begin = torch.get_rng_state(), get_cuda_rng_tracker().get_states()

    def stage(number: int) -> SwarmStage:
        with states(*begin):
            # build the earlier stages, too, so that the weights equal those of a model that is
            # built in one process
            for before in range(number):
                stage_of(make, before, swarm.stages, args.num_layers, forward_step)
            built = stage_of(make, number, swarm.stages, args.num_layers, forward_step)
        refuse_token_ids(plugin_layers(built), "--swarm")
        made[:] = [built]
        return built

    def loss(output: Tensor, batch: Any) -> tuple[Tensor, dict[str, Tensor]]:
        of_stage = made[0].loss
        assert of_stage is not None
        total, *tokens, logged = of_stage(output)
        mean = total / tokens[0].clamp(min=1) if tokens else total
        return mean / count, {name: x.detach() for name, x in logged.items()}

    peer = MegatronPeer(
        address_of(swarm), [functools.partial(stage, number) for number in range(swarm.stages)],
        functools.partial(torch_optimizer, args), loss, host=swarm.host, device=device_of_parts(),
        timeout_s=swarm.timeout_s, secret=_secret(swarm))
    logger.info("swarm: this peer is looking for a trainer at %s", swarm.address)
    with aux_losses.auxiliary_scale(torch.ones(1) * (1 / count)):
        peer.run()


@contextlib.contextmanager
def states(cpu_state: Tensor, tracked: Mapping[str, Tensor]) -> Iterator[None]:
    """Inside the block, use these random states in torch's generator and Megatron's tracker."""
    with torch.random.fork_rng(devices=[]), tracker_states(
            {name: state.clone() for name, state in tracked.items()}):
        torch.set_rng_state(cpu_state)
        yield


def stage_of(make: MakePart, number: int, stages: int, layers: int, forward_step: ForwardStep
             ) -> SwarmStage:
    """Return stage `number`. The layers are divided evenly among the stages."""
    begin, end = (layers * n // stages for n in (number, number + 1))

    def chosen(specs: list[Any]) -> list[Any]:
        return [numbered(specs[i], i + 1) for i in range(begin, end)]

    with core.chosen_layers(chosen):
        part = make(pre_process=number == 0, post_process=number == stages - 1)
        return SwarmStage(part, forward_step)


class SwarmModel(nn.Module):
    """The only model chunk of a trainer, which has no weights and runs the passes on the peers."""

    vp_stage, pre_process, post_process = None, True, True

    model_type: Any  # read by Megatron

    def __init__(self, empty: nn.Module, trainer: Swarm | JoinedTrainer) -> None:
        super().__init__()
        self.config, self.pg_collection = empty.config, getattr(empty, "pg_collection", None)
        self.trainer, self.norm = trainer, 0.0

    def close(self) -> None:
        """Notify the other processes that this trainer has ended."""
        if isinstance(self.trainer, Swarm):
            self.trainer.close()
        else:
            logger.info("this trainer has processed %d micro-batches", self.trainer.driven)

    def passes(self, *, data_iterator: Any, num_microbatches: int, forward_only: bool = False,
               **_: Any) -> list[dict[str, Tensor]]:
        """Run the forward and backward passes of a step. This method has the same arguments as the
        function that it replaces, which Megatron's `get_forward_backward_func` returns.
        """
        iterator = data_iterator[0] if isinstance(data_iterator, list) else data_iterator
        batches = (next(iterator) for _ in range(num_microbatches))
        given = [(torch.zeros(1, dtype=torch.int64),
                  {name: x for name, x in batch.items() if isinstance(x, Tensor)})
                 for batch in batches]
        trainer: Any = self.trainer
        leads = isinstance(trainer, Swarm)
        if forward_only:
            result = trainer.evaluate(given)
        else:
            result = trainer.accumulate(given) if leads else trainer.step(given)
            self.norm = float(result.norm if leads else result["norm"])
        return list(result.logged if leads else result["logged"])

    def zero_grad_buffer(self) -> None:
        """Do nothing, because the peers clear their gradients."""


class SwarmOptimizer(StreamedOptimizer):
    """The optimizers of all peers, with the interface of a single Megatron optimizer."""

    param_groups: list[dict[str, Any]] = []  # noqa: RUF012 - every instance sets its own list

    def __init__(self, model: SwarmModel, args: argparse.Namespace) -> None:
        self.model = model
        some = [nn.Parameter(torch.zeros([1] * axes)) for axes in (2, 1)]
        self.param_groups = torch_optimizer(args, some).param_groups

    def step(self) -> tuple[bool, float | None, None]:
        """Make all peers run an optimizer step. See `StreamedOptimizer.step`."""
        skip = self.prepare_grads()
        if isinstance(self.model.trainer, Swarm):
            self.model.trainer.update(skip, [
                {name: group[name] for name in ("lr", "weight_decay", "wd_mult")}
                for group in self.param_groups])
        return (False, None, None) if skip else (True, self.model.norm, None)


def set_up(given: Mapping[str, Any], run: Callable[[], Run], forward_step: ForwardStep
           ) -> tuple[list[SwarmModel], SwarmOptimizer | None, Any]:
    """Build the model, optimizer and scheduler, and return them like Megatron's
    `setup_model_and_optimizer`.

    If this process is a peer, serve requests instead, and then exit the process.

    Args:
        given: dict of the arguments of `setup_model_and_optimizer`, by name.
        run: function that returns the current run object.
        forward_step: forward step function of the script.
    """
    arguments = script_arguments()
    args, make = argparse.Namespace(**arguments), stages_of(given)
    swarm = run_config(settings_from_flags(arguments)).swarm
    SWARM.refuse(values_of(args, settings_from_flags(arguments), processes=dist.get_world_size()))
    if swarm.role == "peer":
        serve(swarm, args, make, forward_step)
        raise SystemExit(0)
    with core.chosen_layers(lambda specs: []):
        empty = make(pre_process=False, post_process=False)
    settings = model_settings(args, empty.config)
    progress: dict[str, Any] = {}
    folder: Path | None = None
    if swarm.role == "lead" and args.load is not None:
        found = read_progress(args.load, args.ckpt_step, META, settings, "it was not written by a "
                              "swarm. Pass another folder to --load, or leave out --swarm.")
        progress, folder = found or ({}, None)
    trainer = _trainer(swarm, args, folder)
    model = SwarmModel(empty, trainer)
    optimizer = SwarmOptimizer(model, args)
    if swarm.role == "join":
        progress = {"iteration": trainer.steps,
                    "consumed_samples": trainer.steps * args.global_batch_size}
    scheduler = begin(given, run, model, optimizer, progress)
    if isinstance(trainer, Swarm):
        logger.info("swarm: %s is waiting for %d peers", swarm.address,
                    swarm.peers or swarm.stages)
        trainer.wait_for(swarm.peers or swarm.stages)
    return [model], optimizer, scheduler


def _trainer(swarm: SwarmConfig, args: argparse.Namespace, folder: Path | None
             ) -> Swarm | JoinedTrainer:
    host, port = address_of(swarm)
    if swarm.role == "join":
        return JoinedTrainer((host, port), timeout_s=swarm.timeout_s, secret=_secret(swarm))
    return Swarm(
        swarm.stages, host=host, port=port, wire=swarm.wire, clip=args.clip_grad or None,
        timeout_s=swarm.timeout_s, rebalance_s=swarm.rebalance_s or None, seed=args.seed,
        target_to_all=True, resume=folder, secret=_secret(swarm))


def save(given: Mapping[str, Any]) -> None:
    """Write a checkpoint of all stages. This function replaces Megatron's `save_checkpoint`.

    Only the leading trainer writes the checkpoint. `given` is a dict of the arguments of
    `save_checkpoint`, by name.
    """
    arguments, [model] = script_arguments(), given["model"]
    if not isinstance(model.trainer, Swarm):
        return
    root, iteration = arguments["save"], given["iteration"]
    folder = model.trainer.save(files.folder(root, iteration))
    write_whole(Path(folder, META), checksums.seal_json({
        **progress_of(given),
        "settings": model_settings(argparse.Namespace(**arguments), model.config)}))
    write_whole(Path(root, files.LATEST), str(iteration))


def address_of(swarm: SwarmConfig) -> tuple[str, int]:
    """Return the host name and port of the leading trainer."""
    host, _, port = swarm.address.rpartition(":")
    return host, int(port)


def _secret(swarm: SwarmConfig) -> str | None:
    if swarm.secret is None:
        return None
    check_input(Path(swarm.secret))
    return Path(swarm.secret).read_text(encoding="utf-8").strip()
