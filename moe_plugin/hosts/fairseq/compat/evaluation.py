"""Run `fairseq-validate`, `fairseq-eval-lm` and `fairseq-generate` with one or several processes.

Several processes divide the batches and the experts among themselves. This module also adds the
`eval_lm` flags of fairseq's `moe` branch.

fairseq <= 0.12.3 assigns every N-th batch to each process, but only `fairseq-validate` combines the
results of the processes. `fairseq-validate` fails if a process has no batch. For generation,
fairseq <= 0.12.3 starts only one process.
"""

from __future__ import annotations

import json
import logging
import math
import os
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Optional

import torch
import torch.distributed as dist

from moe_plugin.comm.host_collectives import gather_objects
from moe_plugin.hosts.fairseq.compat.launch import errors_of_use_in_one_line, started_by_torchrun
from moe_plugin.hosts.fairseq.compat.patching import Overlay, add_field, patch, replaces
from moe_plugin.hosts.fairseq.groups import Evaluation, evaluating
from moe_plugin.observe.features import DropWarning
from moe_plugin.utils.regular_files import make_folder, write_regular

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Command:
    """Wrapper that runs a command's `main` as a process of an `Evaluation`. Can be pickled."""

    main: Callable[..., Any]

    def __call__(self, cfg: Any, **kwargs: Any) -> Any:
        """Run the evaluation and return the value that `main` returns."""
        ranks = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
        with evaluating(ranks) as evaluation:
            result = self.run(cfg, evaluation, kwargs)
        if evaluation.rank == 0:
            DropWarning().evaluation(evaluation.drops.take())
        return result

    def run(self, cfg: Any, evaluation: Evaluation, kwargs: dict[str, Any]) -> Any:
        """Call `main` while some names in its module are replaced."""
        with _replaced(self.main.__globals__, **self.names(cfg, evaluation)):
            return self.main(cfg, **kwargs)

    def names(self, cfg: Any, evaluation: Evaluation) -> dict[str, Any]:
        """Return the replacements for names in the module of `main`, as a dict."""
        raise NotImplementedError


class Validate(_Command):
    """Wrapper around the `main` function of `fairseq-validate`."""

    def names(self, cfg: Any, evaluation: Evaluation) -> dict[str, Any]:
        """Return replacements that make all ranks finish together, even without a batch."""
        checkpoints = self.main.__globals__["checkpoint_utils"]
        load = checkpoints.load_model_ensemble_and_task

        def load_model_ensemble_and_task(*args: Any, **kwargs: Any) -> Any:
            models, saved, task = load(*args, **kwargs)
            step = task.valid_step
            # a rank without a batch adds nothing to the sums
            task.valid_step = lambda sample, *rest: step(sample, *rest) if sample else (0, 0, {})
            return models, saved, task

        return {
            "checkpoint_utils": Overlay(
                checkpoints, load_model_ensemble_and_task=load_model_ensemble_and_task),
            "progress_bar": _ending_together(self.main, lambda: _end(evaluation)),
        }


class EvalLM(_Command):
    """Wrapper around `fairseq-eval-lm` that supports `--max-valid-steps` and `--stats-path`."""

    def names(self, cfg: Any, evaluation: Evaluation) -> dict[str, Any]:
        """Return replacements that make all ranks finish together and combine their scores."""
        names, counts = self.main.__globals__, [0]
        evaluate, steps = names["eval_lm"], cfg.dataset.max_valid_steps
        if steps is not None:  # the limit counts batches of all ranks, which get them in turns
            steps = len(range(evaluation.rank, steps, evaluation.ranks))

        def eval_lm(*args: Any, batch_iterator: Iterable[Any], **rest: Any) -> Any:
            names["SequenceScorer"] = _counting(names["SequenceScorer"], counts, rest)
            result = evaluate(*args, batch_iterator=islice(batch_iterator, steps), **rest)
            _end(evaluation)
            return _over_ranks(result, counts[0], evaluation)

        return {"eval_lm": eval_lm, "SequenceScorer": names["SequenceScorer"]}

    def run(self, cfg: Any, evaluation: Evaluation, kwargs: dict[str, Any]) -> Any:
        """Run the evaluation and write its results to the `--stats-path` file."""
        began = time.time()
        results = super().run(cfg, evaluation, kwargs)
        if cfg.eval_lm.stats_path and evaluation.rank == 0:
            _write(Path(f"{cfg.eval_lm.stats_path}.json"), cfg.dataset.gen_subset,
                   {**results, "wall_time": time.time() - began})
        return results


class Generate(_Command):
    """Wrapper around the `main` function of `fairseq-generate`."""

    def names(self, cfg: Any, evaluation: Evaluation) -> dict[str, Any]:
        """Return replacements that make all ranks finish together. The score covers the hypotheses
        of all ranks, but each rank writes its own result file.
        """
        names = self.main.__globals__
        if evaluation.ranks == 1:
            return {}
        scoring, scorers = names["scoring"], []

        def build_scorer(*args: Any) -> Any:
            scorers.append(_SharedScorer(scoring.build_scorer(*args)))
            return scorers[-1]

        def at_end() -> None:
            _end(evaluation)
            for scorer in scorers:
                scorer.share()

        def print_once(text: str, **where: Any) -> None:
            # every rank prints its hypotheses, but only rank 0 prints the score over all ranks
            if evaluation.rank == 0 or not text.startswith("Generate "):
                print(text, **where)

        return {
            "scoring": Overlay(scoring, build_scorer=build_scorer), "StopwatchMeter": _stopwatch(),
            "progress_bar": _ending_together(self.main, at_end),
            "open": lambda path, *args, **kwargs: open(
                re_ranked(path, evaluation.rank), *args, **kwargs),
            "print": print_once,
        }


def re_ranked(path: str, rank: int) -> str:
    """Insert a rank into a file name: `generate-test.txt` becomes `generate-test-rank-N.txt`."""
    stem, suffix = os.path.splitext(path)
    return f"{stem}-rank-{rank}{suffix}"


def _counting(scorer: Any, counts: list[int], settings: Mapping[str, Any]) -> Any:
    """Return a subclass of fairseq's `SequenceScorer` that counts words. `eval_lm` divides the loss
    by the number of words that this class counts.

    Args:
        scorer: the class.
        counts: list with a single element, to which the number of words is added.
        settings: arguments with which `eval_lm` was called.
    """
    words, mark = settings["source_dictionary"], (settings.get("post_process") or "").rstrip()
    # word pieces that are continued by another piece do not count as words
    pieces = torch.tensor([index for index in range(len(words)) if words[index].endswith(mark)]
                          if mark else [], dtype=torch.int64)
    first = int(bool(settings.get("remove_bos_token")))

    class Counting(scorer):  # type: ignore[misc]
        def generate(self, models: Any, sample: Any, **kwargs: Any) -> Any:
            results = super().generate(models, sample, **kwargs)
            for best in (hypotheses[0] for hypotheses in results):
                counts[0] += int(best["positional_scores"][first:].isfinite().sum())
                counts[0] -= int(torch.isin(best["tokens"][first:].cpu(), pieces).sum())
            return results

    return Counting


def _over_ranks(logged: Mapping[str, Any], count: int, evaluation: Evaluation) -> Any:
    """Return the loss (in bits per word) and the perplexity that `eval_lm` computes, averaged over
    the words of all ranks.

    count: number of words on the current rank.
    """
    if evaluation.ranks == 1:
        return logged
    everyone = gather_objects((float(logged["loss"]) * count, count), "losses of an evaluation")
    words = sum(rank_count for _, rank_count in everyone)
    loss = sum(bits for bits, _ in everyone) / words if words else 0.0
    return {"loss": loss, "perplexity": 2.0**loss}


class _SharedScorer:
    """A fairseq scorer that receives the hypotheses of all ranks when `share` is called."""

    def __init__(self, scorer: Any) -> None:
        self._scorer = scorer
        self._given: list[tuple[str, Any]] = []

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._scorer, name)
        if name not in ("add", "add_string"):
            return value

        def add(*args: Any) -> None:
            value(*args)
            self._given.append((name, args))

        return add

    def share(self) -> None:
        """Send this rank's hypotheses to all ranks, and add the hypotheses of all other ranks to
        this scorer. This is a collective operation.
        """
        everyone = gather_objects(self._given, "hypotheses to be scored")
        for rank, given in enumerate(everyone):
            for name, args in given if rank != dist.get_rank() else ():
                getattr(self._scorer, name)(*args)


def _stopwatch() -> Any:
    """Return a subclass of fairseq's `StopwatchMeter` that reports a speed of 0 if nothing was
    measured. fairseq's own class raises an error if nothing was measured.
    """
    from fairseq.logging.meters import StopwatchMeter

    class Stopwatch(StopwatchMeter):  # type: ignore[misc]
        def __init__(self, round: int | None = None) -> None:
            super().__init__(round)
            self.sum = sys.float_info.min

        @property
        def avg(self) -> Any:
            return self.sum / self.n if self.n > 0 else math.inf

    return Stopwatch


# the key is the name of the file that defines `main`, because a command may run as `__main__`
COMMANDS: dict[str, type[_Command]] = {
    "validate": Validate, "eval_lm": EvalLM, "generate": Generate
}


def _command_of(main: Any) -> Any:
    code: Any = getattr(main, "__code__", None)  # `main` may be any callable
    command = COMMANDS.get(Path(code.co_filename).stem) if code is not None else None
    return main if command is None or "fairseq_cli" not in code.co_filename else command(main)


@contextmanager
def _replaced(names: dict[str, Any], **new: Any) -> Iterator[None]:
    missing = object()
    old = {name: names.get(name, missing) for name in new}
    names.update(new)
    try:
        yield
    finally:
        for name, value in old.items():
            if value is missing:
                del names[name]
            else:
                names[name] = value


def _end(evaluation: Evaluation) -> None:
    if evaluation.turns is not None:
        evaluation.turns.end()


class _Batches:
    """A progress bar that calls a function after the last batch."""

    def __init__(self, bar: Any, at_end: Callable[[], None]) -> None:
        self._bar, self._at_end = bar, at_end

    def __iter__(self) -> Iterator[Any]:
        yield from self._bar
        self._at_end()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._bar, name)


def _ending_together(main: Any, at_end: Callable[[], None]) -> Any:
    bars = main.__globals__["progress_bar"]

    def progress_bar(*args: Any, **kwargs: Any) -> _Batches:
        return _Batches(bars.progress_bar(*args, **kwargs), at_end)

    return Overlay(bars, progress_bar=progress_bar)


def _write(path: Path, subset: str, results: dict[str, Any]) -> None:
    rounded = {name: round(float(value), 4) for name, value in results.items()}
    make_folder(path.parent)
    write_regular(path, json.dumps({subset: rounded}) + "\n")
    logger.info("Evaluation results saved to %s", path)


@patch
def eval_lm_flags() -> None:
    """Add the flag `--stats-path` of fairseq's `moe` branch, which fairseq <= 0.12.3 lacks.

    fairseq <= 0.12.3 defines `--max-valid-steps`, but `fairseq-eval-lm` ignores this flag. See
    `EvalLM`.
    """
    from fairseq.dataclass.configs import EvalLMConfig

    # fairseq reads typing.Optional, not `| None`
    add_field(EvalLMConfig, "stats_path", Optional[str], None,  # noqa: UP045
              "write the results to this path with .json appended (fairseq moe)")


@replaces("distributed.utils.call_main")
def evaluation_together(original: Callable[..., Any], cfg: Any, main: Callable[..., Any],
                        **kwargs: Any) -> Any:
    """Make all processes of an evaluation command share the work (see `Evaluation`)."""
    return original(cfg, _command_of(main), **kwargs)


@replaces("options.get_generation_parser")
def generation_by_several(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Allow `fairseq-generate` to run with several processes, like the other evaluation commands.

    torchrun or `--distributed-world-size N` starts the processes. With `--distributed-rank`, the
    current process computes only its own share, as in fairseq.
    """
    for name in ("fairseq_cli.generate", "__main__"):  # the command imports fairseq.options earlier
        module: Any = sys.modules.get(name)
        main = module and module.__dict__.get("main")
        if isinstance(_command_of(main), Generate):
            module.main = _Start(module, main)
    return original(*args, **kwargs)


@dataclass(frozen=True)
class _Start:
    """A replacement for `main` that the command line calls."""

    module: Any
    main: Callable[..., Any]

    def __call__(self, args: Namespace) -> Any:
        from fairseq.dataclass.utils import convert_namespace_to_omegaconf
        from fairseq.distributed import utils

        self.module.main = self.main  # spawned processes unpickle it by this name
        cfg = convert_namespace_to_omegaconf(args)
        part = any(word.split("=")[0] == "--distributed-rank" for word in sys.argv)
        if part or not (started_by_torchrun() or args.distributed_world_size > 1):
            with errors_of_use_in_one_line(cfg):
                return Generate(self.main)(cfg)
        return utils.call_main(cfg, self.main)
