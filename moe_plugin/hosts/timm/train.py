"""Train a SwinV2-MoE model or its dense counterpart on a folder of images.

    python -m moe_plugin.hosts.timm.train --example digits --data IMAGES --out RUN
    torchrun --standalone --nproc_per_node 2 -m moe_plugin.hosts.timm.train --data IMAGES \\
        --out RUN --preset swin_s --moe-eval-capacity-factor 0.5

If the output folder already contains a run, the command continues that run. The number of ranks can
change, as long as the experts can be divided among the new number of ranks. `moe-plugin report RUN`
creates a report about the run.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import sys
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from moe_plugin.checkpoint import load, save
from moe_plugin.checkpoint.save_load import Leave
from moe_plugin.comm import TorchComm
from moe_plugin.comm.watchdog import claim_first_report, is_of_another_rank, says_why
from moe_plugin.config import RunConfig, of_layer
from moe_plugin.config.flags import file_settings, settings_from_flags
from moe_plugin.hosts.plain.blocks import auxiliary_loss, blocks_in, optimizer_groups
from moe_plugin.hosts.plain.run import TrainingSteps
from moe_plugin.hosts.plain.sharding import ddp_model
from moe_plugin.hosts.timm.arguments import (
    check_arguments,
    ensemble_of,
    parser,
    run_settings_of,
    smoothing_of,
)
from moe_plugin.hosts.timm.data import Images, ImageSet, Masks, write_example
from moe_plugin.hosts.timm.model import (
    PRESETS,
    SwinMoE,
    build,
    build_ensemble,
    freeze_experts,
    head_of_other_classes,
)
from moe_plugin.hosts.timm.published import read_published
from moe_plugin.hosts.timm.tasks import VisionTask
from moe_plugin.observe.history.json_lines import step_record
from moe_plugin.utils.messages import short
from moe_plugin.utils.run_feature import StepFacts

# names of timm's blocks, the units for which activations are kept, recomputed or offloaded
BLOCKS = "SwinTransformerV2Block", "SwinTransformerBlock"


class Trainer:
    """A training run, with its model, data, optimizer and progress.

    Attributes:
        steps: the `TrainingSteps` object that runs the training steps.
        accuracy: accuracy in the most recent evaluation, between 0 and 1.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.epoch, self.accuracy = args, 0, math.nan
        flags = vars(args)
        given = {**file_settings(flags), **settings_from_flags(flags)}
        settings = run_settings_of(given, args.out / "stats.jsonl")
        check_arguments(args, given)
        in_file = given.pop("num_experts", None)
        self.task = VisionTask(ensemble_of(args), smoothing_of(args), args.task == "segment")
        self.comm = TorchComm(timeout_s=args.timeout)
        if self.comm.rank == 0 and args.example:
            write_example(args.example, args.data)
        self.comm.barrier()
        size = PRESETS[args.preset]
        if args.image:
            size = dataclasses.replace(size, image=args.image)
        if experts := args.experts or in_file:
            size = dataclasses.replace(size, experts=experts)
        part = {"size": size.image, "flips": args.flips}
        set_class = Masks if self.task.segments else Images
        self.train_set: ImageSet = set_class(args.data / "train", training=True, **part)
        self.valid_set: ImageSet = set_class(args.data / "val", training=False, **part)
        if self.train_set.classes != self.valid_set.classes:
            raise ValueError(f"train and val in {args.data} have different classes. Only one of "
                             "them has: "
                             f"{set(self.train_set.classes) ^ set(self.valid_set.classes)}")
        torch.manual_seed(args.seed)
        self.model = self._model(size, given)
        if args.freeze_experts:
            freeze_experts(self.model)
        self.wrapped = ddp_model(self.model) if self.comm.size > 1 else self.model
        self.optimizer = torch.optim.AdamW(optimizer_groups(
            self.model, args.lr, weight_decay=args.weight_decay))
        self.blocks = list(blocks_in(self.model))
        self.loss = torch.zeros(())  # loss of the images in the last step, without router losses
        self.steps = TrainingSteps(
            self.wrapped, self.optimizer, self.loss_of, self._settings(settings),
            clip=args.clip, world=self.comm, has_log=True,
            folder=None if args.evaluate else args.out,
            layers={name: block.moe for name, block in self.blocks},
            blocks=[m for m in self.model.modules() if type(m).__name__.endswith(BLOCKS)])
        self.epoch_steps = math.ceil(len(self.train_set) / (args.batch_size * self.comm.size))

    def _settings(self, settings: RunConfig) -> RunConfig:
        args, observe = self.args, settings.observe
        if args.evaluate:
            return RunConfig()
        return dataclasses.replace(settings, observe=dataclasses.replace(
            observe, interval=args.log_every, jsonl=None if args.dense else observe.jsonl))

    @property
    def step(self) -> int:
        """Number of optimizer steps that have been completed."""
        return self.steps.done

    def _model(self, size: SwinMoE, given: dict[str, Any]) -> nn.Module:
        args, ensemble = self.args, self.task.ensemble
        classes = len(self.train_set.classes)
        common = {"dense": args.dense, "comm": self.comm, "settings": of_layer(given)}
        if ensemble is None:
            return (build_ensemble(size, classes, 1, segments=True, **common)
                    if self.task.segments
                    else build(size, classes, widen=args.widen, **common))
        return build_ensemble(
            size, classes, ensemble.heads, hidden=ensemble.hidden, sharing=ensemble.sharing,
            begin=args.ensemble_from, share_after=args.ensemble_share_after,
            segments=self.task.segments, **common)

    @property
    def folder(self) -> Path:
        """Path of the checkpoint folder."""
        return self.args.out / "checkpoint"

    def run(self) -> None:
        """Train until the last epoch, starting from the last checkpoint or from the initial
        weights. With `--evaluate`, only evaluate once.
        """
        if self.args.evaluate:
            return self.report_evaluation()
        if self.there(self.folder):
            extra = load(self.folder, self.model, self.optimizer, self.comm)
            self.check_classes(self.folder, extra)
            self.epoch, self.steps.done = extra["epoch"], extra["step"]
            self.say(f"continues after epoch {self.epoch} of {self.args.epochs}")
        elif self.args.init:
            self.begin_with(self.args.init)
        self.steps.total = self.args.epochs * self.epoch_steps
        while self.epoch < self.args.epochs:
            self.train_epoch()
            self.epoch += 1
            results = self.evaluate()
            self.accuracy = results["accuracy"]
            self.write({"iteration": self.step, "lm_loss": None, **results, "epoch": self.epoch})
            self.say(f"epoch {self.epoch}/{self.args.epochs} | {told(results)}")
            save(self.folder, self.model, self.optimizer, self.comm,
                 {"epoch": self.epoch, "step": self.step, "accuracy": self.accuracy,
                  "classes": self.classes})

    @property
    def classes(self) -> list[str]:
        """Names of the classes, in the order of the model's outputs."""
        return self.train_set.classes

    def there(self, path: Path) -> bool:
        """Return True on all ranks if the folder exists for at least one rank."""
        [exists] = self.comm.agree_max([float(path.exists())])
        return bool(exists)

    def begin_with(self, path: Path) -> None:
        """Read initial weights. If the classes differ, the head keeps its random weights."""
        fresh: list[str] = []

        def leave(shapes: Mapping[str, tuple[int, ...]], extra: Mapping[str, Any]) -> list[str]:
            fresh.extend(head_of_other_classes(self.model, self.classes, shapes, extra))
            return fresh

        self.read_weights(path, leave)
        head = (f"; the head starts with random weights for {len(self.classes)} other classes"
                if fresh else "")
        self.say(f"starts with the weights of {path}{head}")

    def read_weights(self, path: Path, leave: Leave | None = None) -> Mapping[str, Any]:
        """Read the weights from a checkpoint of a run, or from published files.

        Args:
            path: path of the checkpoint folder, or path of the published files without suffix.
            leave: see `checkpoint.load`.
        Returns: the additional values in the checkpoint.
        Raises:
            ValueError: If neither a checkpoint nor published files are found, or if they do not
                match the model.
        """
        if self.there(path):
            return load(path, self.model, None, self.comm, leave)
        if any(self.there(path.with_name(path.name + end)) for end in (".rank0", ".global")):
            read_published(self.model, path, leave)
            return {}
        raise ValueError(f"there is no checkpoint {path}. Use the checkpoint folder of a run, "
                         "such as RUN/checkpoint, or the PATH of published files PATH.rank0 or "
                         "PATH.global")

    def check_classes(self, source: Path, extra: Mapping[str, Any]) -> None:
        """Raise a `ValueError` if the classes of a checkpoint differ from those in `--data`."""
        theirs = extra.get("classes", self.classes)
        if theirs != self.classes:
            raise ValueError(
                f"{source} was trained on the classes {short(theirs)}, but --data "
                f"{self.args.data} has {short(self.classes)}. To train the model for other "
                "classes, pass this checkpoint to --init and use another --out")

    def report_evaluation(self) -> None:
        """Evaluate the weights once, print the metrics, and append them to `evaluations.jsonl`."""
        source = self.args.init or self.folder
        self.check_classes(source, self.read_weights(source))
        results = self.evaluate()
        self.write({"weights": str(source), **results}, "evaluations.jsonl")
        self.say(f"{source} | {told(results)}")

    def train_epoch(self) -> None:
        """Train once on every image, in an order that depends only on the seed and the epoch."""
        args = self.args
        random = torch.Generator().manual_seed(1_000_003 * args.seed + self.epoch)
        order = torch.randperm(len(self.train_set), generator=random)
        torch.manual_seed(7919 * args.seed + 31 * self.epoch + self.comm.rank)  # for crops, noise
        self.wrapped.train()
        begun, images, total = time.perf_counter(), 0, torch.zeros(2)
        count, step = len(self.train_set), args.batch_size * self.comm.size
        for number, (x_BCSS, y, real_B) in enumerate(self.train_set.batches(
                args.batch_size, self.comm.rank, self.comm.size, order)):
            of_all = min(step, count - number * step)
            self.set_rate(self.epoch + number / self.epoch_steps)
            if self.steps((x_BCSS, y, real_B, of_all)) is None:
                continue  # the skipped step has been logged
            images += of_all
            total += torch.tensor([float(self.loss), 1.0])
            if self.step % args.log_every == 0:
                seconds = time.perf_counter() - begun
                mean, calls = self.comm.all_reduce(total).tolist()
                self.log({"iteration": self.step, "lm_loss": mean / calls,
                          "tokens_per_s": images / seconds, "grad_norm": float(self.steps.norm),
                          "lr": self.optimizer.param_groups[0]["lr"], "seconds": seconds})
                begun, images, total = time.perf_counter(), 0, torch.zeros(2)

    def loss_of(self, model: nn.Module, batch: tuple[Tensor, Tensor, Tensor, int]) -> Tensor:
        """Return the loss of the current rank in a step. Store the loss without router losses in
        the attribute `loss`.

        Averaged over all ranks, `loss` is the mean loss of all images in the step.
        """
        x_BCSS, y, real_B, of_all = batch
        loss_B = self.task.losses(model(x_BCSS), y, training=True)
        # gradients are averaged over ranks: the factor gives each image of a short last step the
        # same weight
        loss = (loss_B * real_B).sum() * self.comm.size / of_all
        self.loss = loss.detach()
        return loss + auxiliary_loss(self.model) if self.blocks else loss

    def set_rate(self, epochs: float) -> None:
        """Set the learning rate. The learning rate increases linearly during warm-up, and then
        follows half a cosine down to 1 % of its maximum.

        epochs: number of completed epochs, including the completed fraction of the current epoch.
            The number of completed steps is not used, because it would be wrong in a run that
            continues with a different batch size.
        """
        args, steps = self.args, self.args.epochs * self.epoch_steps
        warm, step = max(1, round(args.warm_up * steps)), round(epochs * self.epoch_steps)
        share = (step - warm) / max(1, steps - warm)
        factor = (step + 1) / warm if step < warm else (
            0.01 + 0.99 * (1 + math.cos(math.pi * min(1.0, share))) / 2)
        for group in self.optimizer.param_groups:
            group["lr"] = args.lr * factor

    def evaluate(self) -> dict[str, Any]:
        """Return the metrics of `VisionTask.results` for all validation images."""
        return self.steps.evaluate(self._evaluated)

    def _evaluated(self) -> dict[str, Any]:
        sums, routed_2 = torch.zeros(1, dtype=torch.float64), torch.zeros(2, dtype=torch.float64)
        for x_BCSS, y, real_B in self.valid_set.batches(self.args.batch_size, self.comm.rank,
                                                        self.comm.size):
            sums = sums + self.task.counts(self.model(x_BCSS), y, real_B)
            for _, block in self.blocks:
                assert block.last is not None and block.last.stats is not None
                stats = block.last.stats
                routed_2 += torch.stack([stats.load_KE.sum(), stats.kept_KE.sum()]).double()
        routed, kept = self.comm.all_reduce(routed_2).tolist()
        results = self.task.results(self.comm.all_reduce(sums))
        return {**results, "drop_fraction": 1 - kept / routed} if routed else results

    def log(self, record: dict[str, Any]) -> None:
        """Append a record to the training log, and pass it to the features of the run."""
        self.write(record)
        self.steps.run.after_log(StepFacts(self.step, logged=step_record(record)[0]))

    def write(self, record: dict[str, Any], file: str = "log.jsonl") -> None:
        """Append a record to a file in the folder of the run. Only rank 0 writes the file."""
        if self.comm.rank == 0:
            with open(self.args.out / file, "a", encoding="utf-8") as stream:
                stream.write(json.dumps(record) + "\n")

    def say(self, text: str) -> None:
        """Print a line on rank 0."""
        if self.comm.rank == 0:
            print(text, flush=True)


def told(values: dict[str, Any]) -> str:
    """Format the metrics of an evaluation as a single line."""
    named = {"accuracy": "accuracy", "oracle_error": "oracle error", "iou": "IoU",
             "drop_fraction": "dropped"}
    return " | ".join([f"valid loss {values['valid_loss']:.4f}", *(
        f"{text} {100 * values[name]:.2f} %" for name, text in named.items() if name in values)])


def main(argv: Sequence[str] | None = None) -> int:
    """Run the training script with command-line arguments."""
    args = parser(__doc__).parse_args(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    gloo: dict[str, Any] = {"backend": "gloo", "timeout": timedelta(seconds=args.timeout)}
    if "RANK" in os.environ:
        dist.init_process_group(**gloo)
    else:
        dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1, **gloo)
    try:
        with says_why():
            trainer = Trainer(args)
            trainer.run()
            trainer.steps.close()
            dist.barrier()
    except Exception as error:
        if not isinstance(error, ValueError) and not is_of_another_rank(error):
            raise
        if claim_first_report(str(error)):
            print(f"error: {error}", file=sys.stderr)
        return 2 if isinstance(error, ValueError) else 1
    finally:
        dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
