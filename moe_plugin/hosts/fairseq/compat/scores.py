"""What evaluating processes found, put together."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from moe_plugin.comm.host_collectives import gather_objects
from moe_plugin.hosts.fairseq.groups import Evaluation


def counting(scorer: Any, counts: list[int], settings: Mapping[str, Any]) -> Any:
    """fairseq's `SequenceScorer`, and the count of words by which `eval_lm` divides.

    Args:
        counts: its one entry counts.
        settings: of `eval_lm`.
    """
    words, mark = settings["source_dictionary"], (settings.get("post_process") or "").rstrip()
    # pieces that another one continues are no words
    pieces = torch.tensor([index for index in range(len(words)) if words[index].endswith(mark)]
                          if mark else [], dtype=torch.int64)
    first = int(bool(settings.get("remove_bos_token")))

    class Counting(scorer):  # type: ignore[misc]
        def generate(self, models: Any, sample: Any, **kwargs: Any) -> Any:
            found = super().generate(models, sample, **kwargs)
            for best in (hypotheses[0] for hypotheses in found):
                counts[0] += int(best["positional_scores"][first:].isfinite().sum())
                counts[0] -= int(torch.isin(best["tokens"][first:].cpu(), pieces).sum())
            return found

    return Counting


def over_ranks(found: Mapping[str, Any], count: int, evaluation: Evaluation) -> Any:
    """Loss (bits a word) and perplexity of `eval_lm` over the words of all ranks.

    count: of this rank.
    """
    if evaluation.ranks == 1:
        return found
    everyone = gather_objects((float(found["loss"]) * count, count), "losses of an evaluation")
    words = sum(rank_count for _, rank_count in everyone)
    loss = sum(bits for bits, _ in everyone) / words if words else 0.0
    return {"loss": loss, "perplexity": 2.0**loss}


class SharedScorer:
    """A scorer of fairseq; after `share` it knows what those of all ranks were given."""

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
        """Collective."""
        everyone = gather_objects(self._given, "hypotheses to be scored")
        for rank, given in enumerate(everyone):
            for name, args in given if rank != dist.get_rank() else ():
                getattr(self._scorer, name)(*args)


def stopwatch() -> Any:
    """fairseq's `StopwatchMeter`, whose speed is 0 where nothing was measured, not an error."""
    from fairseq.logging.meters import StopwatchMeter

    class Stopwatch(StopwatchMeter):  # type: ignore[misc]
        def __init__(self, round: int | None = None) -> None:
            super().__init__(round)
            self.sum = sys.float_info.min

        @property
        def avg(self) -> Any:
            return self.sum / self.n if self.n > 0 else math.inf

    return Stopwatch
