"""Flags of the `moe` branch's `eval_lm` that fairseq 0.12 does not have, or does not read."""

from __future__ import annotations

import itertools
import json
import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional

from moe_plugin.hosts.fairseq.compat.fields import add_field
from moe_plugin.regular_files import make_folder, write_regular

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Evaluation:
    """`main` of `fairseq-eval-lm`, with `--max-valid-steps` and `--stats-path`; can be pickled."""

    main: Callable[..., Any]

    def __call__(self, cfg: Any, **kwargs: Any) -> Any:
        """Evaluate; returns what `main` returns."""
        names, began = self.main.__globals__, time.time()
        evaluate = names["eval_lm"]

        def eval_lm(*args: Any, batch_iterator: Iterable[Any], **rest: Any) -> Any:
            batches = itertools.islice(batch_iterator, cfg.dataset.max_valid_steps)
            return evaluate(*args, batch_iterator=batches, **rest)

        names["eval_lm"] = eval_lm
        try:
            results = self.main(cfg, **kwargs)
        finally:
            names["eval_lm"] = evaluate
        if cfg.eval_lm.stats_path and cfg.distributed_training.distributed_rank in (0, None):
            _write(Path(f"{cfg.eval_lm.stats_path}.json"), cfg.dataset.gen_subset,
                   {**results, "wall_time": time.time() - began})
        return results


def _write(path: Path, subset: str, results: dict[str, Any]) -> None:
    rounded = {name: round(float(value), 4) for name, value in results.items()}
    make_folder(path.parent)
    write_regular(path, json.dumps({subset: rounded}) + "\n")
    logger.info("Evaluation results saved to %s", path)


def eval_lm_flags() -> None:
    """fairseq <= 0.12.3 accepts `--max-valid-steps` in `fairseq-eval-lm` and evaluates everything;
    the branch's `--stats-path` is unknown to it.
    """
    from fairseq.dataclass.configs import EvalLMConfig
    from fairseq.distributed import utils

    # fairseq reads typing.Optional, not `| None`
    add_field(EvalLMConfig, "stats_path", Optional[str], None,  # noqa: UP045
              "write the results to this path with .json at its end (fairseq moe)")
    original = utils.call_main

    def call_main(cfg: Any, main: Callable[..., Any], **kwargs: Any) -> Any:
        evaluates = "eval_lm" in getattr(main, "__globals__", {})
        return original(cfg, Evaluation(main) if evaluates else main, **kwargs)

    utils.call_main = call_main


SHIMS: tuple[Callable[[], None], ...] = (eval_lm_flags,)
