#!/usr/bin/env python3
"""Train a small MoE language model in plain PyTorch, and resume it with any number of ranks.

    torchrun --standalone --nproc_per_node 2 --max-restarts 3 scripts/train_plain.py OUT --steps 200

If the folder OUT contains a run, the script resumes this run. The ranks divide the same sequences
among themselves, so the losses do not depend on the number of ranks. With `--lighthouse`, the job
is one of several replicas that may join and leave (see docs/replicas.md and
scripts/train_elastic.sh).
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from moe_plugin import MoEConfig, MoELayer, weighted_loss
from moe_plugin.checkpoint import load, save
from moe_plugin.comm import Comm, TorchComm
from moe_plugin.comm.watchdog import claim_first_report, leave
from moe_plugin.config import ObserveConfig, RunConfig, with_overrides
from moe_plugin.hosts.plain.run import TrainingSteps
from moe_plugin.hosts.plain.sharding import ddp_model
from moe_plugin.training.resilience.twins import TwinCheck

VOCABULARY, LENGTH = 64, 16


class Model(nn.Module):
    """A language model with an embedding, recurrent and MoE layers with residual connections, and
    an output layer.
    """

    def __init__(self, config: MoEConfig, layers: int, comm: Comm | None = None) -> None:
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(VOCABULARY, config.model_dim)
        self.mix = nn.ModuleList(nn.GRU(config.model_dim, config.model_dim, batch_first=True)
                                 for _ in range(layers))
        self.moe = nn.ModuleList(MoELayer(config, comm) for _ in range(layers))
        self.output = nn.Linear(config.model_dim, VOCABULARY)

    def forward(self, ids_BS: Tensor) -> tuple[Tensor, Tensor]:
        """Return the mean loss per token and the mean balance loss.

        Args:
            ids_BS: int64 [B, S], the token ids of the sequences.
        """
        x_BSD = self.embed(ids_BS[:, :-1])
        balance = x_BSD.new_zeros(())
        for mix, moe in zip(self.mix, self.moe, strict=True):
            x_BSD = x_BSD + mix(F.layer_norm(x_BSD, x_BSD.shape[-1:]))[0]
            out = moe(F.layer_norm(x_BSD, x_BSD.shape[-1:]))
            x_BSD = x_BSD + out.output
            balance = balance + weighted_loss(out.losses, self.config.losses)
        logits = self.output(F.layer_norm(x_BSD, x_BSD.shape[-1:]))
        return F.cross_entropy(logits.flatten(0, 1), ids_BS[:, 1:].flatten()), balance


def config_of(args: argparse.Namespace) -> MoEConfig:
    """Return the settings of the MoE layers for these arguments."""
    return with_overrides(MoEConfig(model_dim=args.width, num_experts=args.experts),
                          {"comm.timeout_s": args.timeout, "losses": {"gshard": args.balance},
                           "experts.hidden_dim": 2 * args.width})


def sequences(step: int, replica: int, count: int) -> Tensor:
    """Return the training sequences of one step, which are noisy arithmetic progressions.

    Returns:
        Token ids, int64 [count, LENGTH + 1].
    """
    random = torch.Generator().manual_seed(1_000_003 * replica + step)
    start, by = torch.randint(0, VOCABULARY, (2, count, 1), generator=random)
    noise = torch.randint(0, 2, (count, LENGTH + 1), generator=random)
    return (start + by % 5 * torch.arange(LENGTH + 1) + noise) % VOCABULARY


class Run:
    """The model, the optimizer and the training progress of this rank."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.saved = args, 0
        torch.manual_seed(args.seed)
        self.comm = TorchComm(timeout_s=args.timeout)
        self.experts: Comm = self.comm
        if args.expert_parallel:
            self.experts = self.comm.contiguous_subgroup(args.expert_parallel)
        self.bare = Model(config_of(args), args.layers, self.experts)
        self.model = ddp_model(self.bare)
        self.optimizer = torch.optim.SGD(self.bare.parameters(), args.lr, momentum=0.9)
        self.folder = Path(args.out, "checkpoint")
        self.check = None
        if args.check_twins:
            self.check = TwinCheck(self.bare, self.comm, every=args.check_twins)
        self.loss = torch.zeros(())
        settings = RunConfig(observe=ObserveConfig(take_over_folder=args.take_over_folder))
        self.steps = TrainingSteps(self.model, self.optimizer, self.loss_of, settings,
                                   clip=args.clip,
                                   world=self.comm, lighthouse=args.lighthouse,
                                   replica=args.replica, folder=args.out)

    @property
    def step(self) -> int:
        """The number of completed training steps, including steps of a replica from which this
        replica received its state.
        """
        return self.steps.done

    def loss_of(self, model: nn.Module, ids_BS: Tensor) -> Tensor:
        """Return the sum of the loss and the balance loss of a batch, and store the loss alone."""
        loss, balance = model(ids_BS)
        self.loss = loss.detach()
        return loss + balance

    def train(self) -> None:
        """Resume from the last checkpoint, if there is one, and train until the last step."""
        if self.folder.exists() or self.folder.with_name("checkpoint.old").exists():
            found = load(self.folder, self.bare, self.optimizer, self.experts)
            self.saved = self.steps.done = found["step"]
            self.say(f"continues from step {self.step} of {self.folder}")
        args = self.args
        while self.step < args.steps:
            loss = self.one_step()
            if loss is not None:
                self.log(loss)
            saves = self.step % args.save_every == 0 and loss is not None
            if self.check is not None and (saves or self.check.due(self.step)):
                self.check(self.step, self.sequences(), lambda ids_BS: sum(self.bare(ids_BS)))
            if saves:  # after the check, so that a checkpoint contains no wrong results
                self.save()
        self.say(f"ended after step {self.step}; losses: {Path(args.out, 'log.jsonl')}; "
                 f"{self.kept()}")

    def kept(self) -> str:
        """Return a text that names the newest checkpoint of this run."""
        saved = f"of step {self.saved} in {self.folder}" if self.saved else "none (--save-every)"
        return f"last checkpoint: {saved}"

    def say(self, what: str) -> None:
        """Print a line of text on rank 0."""
        if self.comm.rank == 0:
            print(what, flush=True)

    def save(self) -> None:
        """Save a checkpoint and keep the previous checkpoint.

        If several groups of ranks each store all experts, the first group saves the checkpoint.
        """
        if self.comm.rank < self.experts.size:
            save(self.folder, self.bare, self.optimizer, self.experts, {"step": self.step},
                 keep_old=True)
        self.comm.barrier()
        self.saved = self.step

    def sequences(self) -> Tensor:
        """Return this rank's share of the sequences of a step, int64 [B, S + 1]."""
        args, comm = self.args, self.comm
        return sequences(self.step, args.replica, args.batch)[comm.rank::comm.size]

    def one_step(self) -> float | None:
        """Run one training step, and return its mean loss over all ranks.

        Returns None if all ranks skipped the step. Returns NaN if the weights were replaced with
        the weights of another replica, because the loss then belongs to the old weights.
        """
        if self.steps(self.sequences()) is None:
            return None
        mean = self.comm.all_reduce(self.loss) / self.comm.size
        return float("nan") if self.steps.run.replaced else float(mean)

    def log(self, loss: float) -> None:
        """Append a line to `log.jsonl` on rank 0."""
        if self.comm.rank == 0:
            line = {"step": self.step, "loss": None if loss != loss else loss}
            if self.args.lighthouse:
                line |= {"replica": self.args.replica, **self.steps.run.numbers()}
            with open(Path(self.args.out, "log.jsonl"), "a", encoding="utf-8") as stream:
                stream.write(json.dumps(line) + "\n")


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse the options. By default, parses the arguments of the command line."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    p.add_argument("out", help="folder of checkpoint and log")
    for name, default, text in [
            ("steps", 200, "training steps"), ("save-every", 50, "steps between checkpoints"),
            ("batch", 8, "sequences per step, over all ranks"), ("width", 32, "model width"),
            ("layers", 2, "number of layers, all with experts"),
            ("experts", 4, "number of experts in a layer"),
            ("seed", 1, "seed of the initial weights"),
            ("replica", 0, "number of this job among the replicas"),
            ("expert-parallel", 0, "number of ranks that share the experts; 0: all ranks"),
            ("check-twins", 0, "steps between checks that ranks with the same experts\ncompute the "
                               "same results, also before each save; 0: no checks")]:
        p.add_argument(f"--{name}", type=int, default=default, help=f"{text} (default: {default})")
    for name, value, text in [("lr", 0.1, "learning rate"),
                              ("clip", 1.0, "largest gradient norm"),
                              ("balance", 0.01, "weight of the balance loss"),
                              ("timeout", 60.0, "seconds that a rank waits for another rank")]:
        p.add_argument(f"--{name}", type=float, default=value, help=f"{text} (default: {value})")
    p.add_argument("--lighthouse", default="", help="address of a torchft lighthouse, for a job "
                                                    "that is one replica of several")
    p.add_argument("--take-over-folder", action="store_true",
                   help="start although another run seems to write to the folder")
    return p.parse_args(argv)


def main() -> int:
    """Run the command line, and return the exit status."""
    args = parse()
    gloo = {"backend": "gloo", "timeout": timedelta(seconds=args.timeout)}
    if "RANK" in os.environ:
        dist.init_process_group(**gloo)
    else:
        dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1, **gloo)
    run = None
    try:
        run = Run(args)
        run.train()
        dist.barrier()
    except ValueError as error:  # raised on all ranks, for example if the disk is full
        if claim_first_report(str(error)):
            kept = f"; {run.kept()}" if run is not None else ""
            print(f"train_plain.py: error: {error}{kept}", file=sys.stderr)
        leave()
        return 2
    finally:
        if run is not None:
            run.steps.close()
    # gloo's threads need Python's lock to free the tensors of the last collective. If the group is
    # destroyed before they acquire the lock, it waits for them forever
    time.sleep(0.1)
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
