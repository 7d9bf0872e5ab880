"""fairseq and Megatron as hosts of the tests of this folder."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.attacks.votes import attack_votes
from tests.hosts.common.host import Host, Ran
from tests.preloaded import Server


class Fairseq(Host):
    """`fairseq-train` of a small language model. Its log has three decimals."""

    name = "fairseq"
    server = Server("tests.hosts.fairseq.preload")
    near, near_16 = {"abs": 2.1e-3, "rel": 0.0}, {"abs": 5e-3, "rel": 0.0}
    compared = ("loss", "inner_loss", "moe_gate_loss", "gnorm")
    layers = ("decoder.layers.1",)
    sgd, adam = "--optimizer sgd --momentum 0.9 --lr 0.1", "--optimizer adam --lr 0.002"
    bf16, dropout, recompute = "--bf16", "--dropout 0.1", "--checkpoint-activations"
    deterministic, twice = "--moe-deterministic", "--update-freq 2"
    plain, ep_flag = "--ddp-backend legacy_ddp", "--moe-expert-parallel-size"
    streams, counts_together, warning = "--weights-on host", True, "Hydra14MigrationWarning"

    @staticmethod
    def attack_votes() -> None:
        attack_votes()

    @staticmethod
    def main(words: Sequence[str]) -> None:
        from tests.hosts.fairseq.commands import run_command

        run_command(words[0], list(words[1:]))

    @staticmethod
    def around_steps(begin: Callable[[torch.nn.Module], None], jump: int = 0) -> None:
        from moe_plugin.hosts.fairseq.trainer import MoETrainer

        step, taken = MoETrainer.train_step, 0

        def train_step(trainer: MoETrainer, *args: Any, **options: Any) -> Any:
            nonlocal taken
            taken += 1
            begin(trainer.model)
            if jump and taken == 2:
                trainer.set_num_updates(jump)
            return step(trainer, *args, **options)

        MoETrainer.train_step = train_step  # type: ignore[method-assign]

    @staticmethod
    def shows(step: int) -> str:
        return f'"num_updates": "{step}"'

    @staticmethod
    def shown(log: str) -> list[int]:
        from tests.hosts.fairseq.conftest import Result

        return [int(row["num_updates"]) for row in Result(0, log).steps]

    @staticmethod
    def finished(home: Path, step: int, steps: int) -> str:
        return f"run of {home} is finished: it has done {step} of --max-update {steps}"

    @staticmethod
    def weights(home: Path) -> list[Path]:
        return [*home.glob("*.pt")]

    def program(self, words: Sequence[str]) -> list[str]:
        return [str(Path(sys.executable).with_name(words[0])), *words[1:]]

    def words(self, home: Path, steps: int, more: str, ep: int, save: int, load: Path | None,
              validate: int) -> list[str]:
        from tests.hosts.fairseq.conftest import DROPLESS, LANGUAGE_MODEL, MOE

        model = LANGUAGE_MODEL.replace(self.sgd, "") if "--optimizer" in more else LANGUAGE_MODEL
        words = ["fairseq-train", str(self.data.lm), "--save-dir", str(home), *(
            f"{model} {MOE} {DROPLESS} --moe-expert-parallel-size {ep} --max-update {steps} "
            "--no-epoch-checkpoints").split()]
        words += ["--save-interval-updates", str(save)] if save else ["--no-save"]
        words += ["--validate-interval-updates", str(validate)] if validate else [
            "--disable-validation"]
        words += [] if load is None else ["--restore-file", str(load)]
        return [*words, *more.split()]

    def evaluate(self, home: Path, more: str = "", ranks: int = 2) -> Ran:
        flags = iter(more.split())
        settings = {flag[2:].replace("-", "_"): value == "true" or value
                    for flag, value in zip(flags, flags, strict=True)}
        words = ["fairseq-validate", str(self.data.lm), "--path", str(home / "checkpoint_last.pt"),
                 *"--user-dir moe_plugin --cpu --task language_modeling --batch-size 6 "
                 "--num-workers 0 --valid-subset valid --model-overrides".split(), repr(settings)]
        done = self.run(home, words, ranks)
        rows = [{name: float(value) for name, value in re.findall(r"(\w+) ([\d.]+)(?: |$)", line)
                 if name in ("inner_loss", "loss", "ppl", "moe_gate_loss")}
                for line in re.findall(r"\| valid on .*", done.log)]
        assert done.code or len(rows) == ranks
        return Ran(done.code, done.log, rows, done.late)

    def rows(self, home: Path, log: str) -> list[dict[str, Any]]:
        from tests.hosts.fairseq.conftest import Result

        return [{**row, "step": int(row["num_updates"]), "norm": row["gnorm"]}
                for row in Result(0, log).steps]

    @staticmethod
    def tokens(row: Mapping[str, Any]) -> int:
        return row["wpb"]

    def checkpoint(self, home: Path, step: int) -> Path:
        return home / f"checkpoint_1_{step}.pt"

    def files(self, home: Path, step: int) -> list[Path]:
        last = [home / "checkpoint_last-rank-1.pt"] if step == self.saved(home, "") else []
        return [home / f"checkpoint_1_{step}-rank-1.pt", *last]

    @staticmethod
    def streamed(home: Path) -> dict[int, Path]:
        found = {re.fullmatch(r"checkpoint_\d+_(\d+)\.pt", path.name): path
                 for path in home.glob("checkpoint_*.pt")}
        return {int(match[1]): path for match, path in found.items() if match}

    @staticmethod
    def digest(path: Path) -> str:
        state = torch.load(path, weights_only=False)
        assert state["extra_state"]["moe_peers"][1]["momentum"]
        found = sha256()
        for name, x in sorted(state["model"].items()):
            # fairseq leaves the values of these open
            if isinstance(x, torch.Tensor) and not name.endswith("_float_tensor"):
                found.update(name.encode() + x.numpy().tobytes())
        return found.hexdigest()

    def saved(self, home: Path, log: str) -> int:
        if log:
            return int(([0, *re.findall(r"Saved checkpoint .* @ (\d+) updates", log)])[-1])
        return max((int(path.name.split("_")[2].split("-")[0])
                    for path in home.glob("checkpoint_1_*-rank-0.pt")), default=0)


class Megatron(Host):
    """Our command on Megatron's own loop, with a small GPT model."""

    name = "megatron"
    server = Server("tests.hosts.megatron.ranks_preload")
    near, near_16 = {"rel": 2e-5, "abs": 1e-6}, {"rel": 5e-4, "abs": 1e-6}
    compared = ("loss", "grad_norm", "aux_losses")
    layers = ("layer1", "layer2")
    sgd, adam = "--optimizer sgd --lr 0.3 --clip-grad 0.1", "--optimizer adam"
    bf16, dropout = "--bf16", "--hidden-dropout 0.1 --attention-dropout 0.1"
    recompute = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
    deterministic, twice, warning = "--deterministic-mode", "", "Apex"
    plain, ep_flag, counts_together = "", "--expert-model-parallel-size", False
    streams = ("--untie-embeddings-and-output-weights --weights-on host --eval-iters 0 "
               "--lr-decay-style constant")

    @staticmethod
    def attack_votes() -> None:
        from moe_plugin.hosts.megatron.compat import finite

        attack_votes()
        finite.all_finite = lambda tensors: False

    @staticmethod
    def main(words: Sequence[str]) -> None:
        from tests.hosts.megatron.ranks import command

        command(words[0], list(words[1:]))

    @staticmethod
    def around_steps(begin: Callable[[torch.nn.Module], None], jump: int = 0) -> None:
        from moe_plugin.hosts.megatron import script

        step = script.Script.around_step

        def around_step(self: script.Script, given: Any, work: Any) -> Any:
            begin(given["model"][0])
            return step(self, given, work)

        script.Script.around_step = around_step  # type: ignore[method-assign]

    @staticmethod
    def shows(step: int) -> str:
        return f"iteration {step:8}/"

    @staticmethod
    def shown(log: str) -> list[int]:
        return [int(number) for number in re.findall(r"iteration +(\d+)/ *\d+ \|", log)]

    @staticmethod
    def finished(home: Path, step: int, steps: int) -> str:
        return (f"the run in {home} is finished: {step} of --train-iters {steps} iterations are "
                "done. Use a larger --train-iters to continue.")

    @staticmethod
    def weights(home: Path) -> list[Path]:
        return [*home.rglob("*.distcp")]

    def program(self, words: Sequence[str]) -> list[str]:
        return ["-m", *words]

    def words(self, home: Path, steps: int, more: str, ep: int, save: int, load: Path | None,
              validate: int) -> list[str]:
        from tests.hosts.megatron.training import MODEL, QUICK, TRAIN

        words = [TRAIN, "--cpu", *QUICK, *MODEL, "--data-path", self.data, "--train-iters",
                 str(steps), "--expert-model-parallel-size", str(ep), "--log-file",
                 str(home / "log.jsonl")]
        if save:
            words += ["--save", str(home), "--save-interval", str(save)]
        if save or load is not None:
            words += ["--load", str(load or home)]
        if validate:
            words += ["--eval-interval", str(validate), "--eval-iters", "1", "--split", "80,20,0"]
        return [*words, *more.split()]

    def evaluate(self, home: Path, more: str = "", ranks: int = 2) -> Ran:
        log = home / "evaluation.jsonl"
        log.unlink(missing_ok=True)
        done = self.run(home, self.words(
            home, self.saved(home, ""), f"--skip-train --log-file {log} {more}", ranks, 0, home, 1),
            ranks)
        return Ran(done.code, done.log, [{"loss": row["valid_loss"]} for row in _lines(log)],
                   done.late)

    def rows(self, home: Path, log: str) -> list[dict[str, Any]]:
        rows = [row for row in _lines(home / "log.jsonl") if "lm_loss" in row]
        return [{**row, "step": row["iteration"], "loss": row["lm_loss"], "norm": row["grad_norm"],
                 "aux_losses": {f"{name} {number}": value for name, values in
                                row.get("aux_losses", {}).items()
                                for number, value in enumerate(values)}} for row in rows]

    @staticmethod
    def tokens(row: Mapping[str, Any]) -> int:
        return 8 * 32  # the batch and the length of a sequence

    def checkpoint(self, home: Path, step: int) -> Path:
        (home / "latest_checkpointed_iteration.txt").write_text(str(step))
        return home

    def files(self, home: Path, step: int) -> list[Path]:
        return [max((home / f"iter_{step:07}").glob("*.distcp"))]

    @staticmethod
    def streamed(home: Path) -> dict[int, Path]:
        return {int(path.parent.name.removeprefix("iter_")): path.parent
                for path in home.glob("iter_*/streamed.json")}

    @staticmethod
    def digest(path: Path) -> str:
        """Also of the outer optimizer's state."""
        found = sha256()
        for file in sorted(path.glob("*.safetensors")):
            for name, x in sorted(load_file(file).items()):
                if name.startswith(("weight", "beside")):
                    found.update(name.encode() + x.numpy().tobytes())
        return found.hexdigest()

    def saved(self, home: Path, log: str) -> int:
        latest = home / "latest_checkpointed_iteration.txt"
        return int(latest.read_text()) if latest.exists() else 0


def _lines(path: Path) -> list[dict[str, Any]]:
    # a line that is being written is left out
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return [json.loads(line) for line in lines]


HOSTS: dict[str, type[Host]] = {"fairseq": Fairseq, "megatron": Megatron}


def marked(name: str, *values: Any, **options: Any) -> Any:
    """A test's parameters that begin with a host."""
    return pytest.param(name, *values, marks=getattr(pytest.mark, name), **options)


def cases(table: Mapping[str, Mapping[str, Any]]) -> pytest.MarkDecorator:
    """Parametrize a test with a host and one of its cases, of which the keys are the names."""
    return pytest.mark.parametrize(("host", "case"), [
        marked(host, case, id=f"{host}-{name}")
        for host, every in table.items() for name, case in every.items()], indirect=["host"])
