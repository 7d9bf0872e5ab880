"""Routing traces: which experts each token of a step went to, written, read and repeated.

The form is that of Megatron's `--moe-routing-trace-path` (0.19 on): one file a rank,
`router_trace_rank0.jsonl`, with one JSON object for each forward pass of a layer in training:

    {"step": 0, "stage": "pre_dispatch", "block": "decoder", "layer": 3, "rank": 0,
     "num_tokens": 128, "topk": 2, "top_indices": [[5, 0], ...]}

`step`: steps completed before it; a step has a record for each pass of a layer. `layer`: of the
whole model, from 0 (Megatron counts those of the pipeline stage). Layers of multi-token prediction:
`block` "mtp" and `mtp_idx`. Tokens are in the layer's order, -1: no expert (padding; a dropped
second choice).
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from moe_plugin.config import ObserveConfig
from moe_plugin.layer import MoELayer, layers_in
from moe_plugin.observe.recorder import marked_here
from moe_plugin.records import Routing
from moe_plugin.routing import Router
from moe_plugin.routing.call import RoutingCall
from moe_plugin.routing.replay import counts
from moe_plugin.routing.rollouts import check_replaceable
from moe_plugin.utils.machine import inside_backward
from moe_plugin.utils.messages import short
from moe_plugin.utils.regular_files import check_input, check_output, make_folder

Key = tuple[str, int | None, int]  # block, mtp_idx, layer


def trace_path(folder: str, rank: int) -> Path:
    """The file of a rank."""
    return Path(folder, f"router_trace_rank{rank}.jsonl")


def read_trace(path: str | Path) -> dict[Key, list[list[Tensor]]]:
    """The choices in a file, int64 [T, K] on the host, by layer in the order of the model, step by
    step.

    Raises:
        ValueError: it cannot be read, or is not such a file; it names the line.
    """
    found: dict[Key, dict[int, list[Tensor]]] = {}
    check_input(path, "routing trace", "write one with observe.trace")
    with open(path, encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            try:
                record = json.loads(line)
                key = record["block"], record.get("mtp_idx"), int(record["layer"])
                ids_TK = torch.tensor(record["top_indices"], dtype=torch.int64)
                ids_TK = ids_TK.reshape(record["num_tokens"], record["topk"])
                found.setdefault(key, {}).setdefault(int(record["step"]), []).append(ids_TK)
            except (ValueError, KeyError, TypeError, RuntimeError) as error:
                raise ValueError(f"routing trace {short(str(path))}, line {number} is not a record "
                                 f"of Megatron's form: {short(error)}; write it again") from error
    in_order = sorted(found, key=lambda key: (key[0] != "decoder", key[1] or 0, key[2]))
    return {key: [found[key][step] for step in sorted(found[key])] for key in in_order}


def read_traces(folder: str | Path) -> list[dict[Key, list[list[Tensor]]]]:
    """`read_trace` of every rank of a folder, in their order.

    Raises: ValueError: there is none, or one cannot be read.
    """
    files = sorted(Path(folder).glob("router_trace_rank*.jsonl"),
                   key=lambda path: (len(path.name), path.name))
    if not files:
        raise ValueError(f"{short(str(folder))} holds no router_trace_rank*.jsonl; write a trace "
                         "with observe.trace, or Megatron's --moe-routing-trace-path")
    return [read_trace(path) for path in files]


class RoutingTrace:
    """Writes what layers choose in training, and has them choose what another trace says.

    Recomputations of a pass count once, repeated steps too. Of torch.compile nothing is written.

    Args:
        layers: with a `MoELayer` each, in the order of the model; a layer's `trace_key` is its
            `Key`, else its place.
        rank: of this process.
        write: folder of this run's trace; None: none. What is there is kept where it is of steps
            before the first of this run, which goes on from a checkpoint.
        steps: this run adds its first steps, so many; 0: all.
        replay: folder of a trace: pass m of a layer in step n takes the m-th record of the n-th
            step there, and after the last step again those of the first, in place of the router's
            choice (see `Router.forced`); layers go by their order. None: none.
    Raises:
        ValueError: a folder that cannot be written, a trace that does not fit these layers.
    """

    def __init__(self, layers: Mapping[str, nn.Module], rank: int, *, write: str | None = None,
                 steps: int = 0, replay: str | None = None) -> None:
        self.rank, self.steps, self.ended = rank, steps, 0
        self.path = None if write is None else trace_path(write, rank)
        self.records: list[tuple[Key, Tensor]] = []  # of this step
        self.replays: list[_Replay] = []
        moes = [layers_in(layer)[0] for layer in layers.values()]
        if replay is not None:
            self._replay(moes, trace_path(replay, rank))
        if self.path is not None:
            make_folder(self.path.parent)
            check_output(self.path)
            for place, (layer, moe) in enumerate(zip(layers.values(), moes, strict=True)):
                key = getattr(layer, "trace_key", None) or ("decoder", None, place)
                moe.router.register_forward_hook(self._hook(key))
        marked_here(self)

    def _replay(self, moes: list[MoELayer], path: Path) -> None:
        trace = read_trace(path)
        if len(trace) != len(moes):
            raise ValueError(f"routing trace {short(str(path))} has {len(trace)} layers, this rank "
                             f"has {len(moes)}: must be equal; give the trace of this model in "
                             "this layout")
        for moe, steps in zip(moes, trace.values(), strict=True):
            router = moe.router
            check_replaceable(router, "observe.replay")
            self.replays.append(_Replay(router, _checked(steps, moe.config.num_experts, path)))
            router.forced = self.replays[-1]

    def _hook(self, key: Key) -> Callable[[nn.Module, Any, Routing], None]:
        def hook(router: nn.Module, args: Any, routing: Routing) -> None:
            if torch.compiler.is_compiling() or not counts(router.training):
                return
            if not self.steps or self.ended < self.steps:
                self.records.append((key, routing.ids_TK.detach()))
        return hook

    def mark(self) -> Callable[[], None]:
        """What undoes all later passes, as `StatsRecorder.mark`."""
        kept, places = len(self.records), [one.passes for one in self.replays]

        def undo() -> None:
            del self.records[kept:]
            for one, place in zip(self.replays, places, strict=True):
                one.passes = place

        return undo

    def end_step(self, number: int, made: bool = True) -> None:
        """Write the records of step `number`, counted from 1; made: False: the step is lost, and so
        are they.

        Raises:
            ValueError: a trace that is replayed has more records of this step than passes were.
        """
        records, self.records = self.records, []
        first, self.ended = not self.ended, self.ended + made
        for replay in self.replays:
            replay.end_step(made)
        if self.path is None or not made:
            return
        if first:
            _keep(self.path, number - 1)
        with open(self.path, "a", encoding="utf-8") as file:
            for (block, mtp_idx, layer), ids_TK in records:
                tokens, top_k = ids_TK.shape
                record = {"step": number - 1, "stage": "pre_dispatch", "block": block,
                          "layer": layer, "rank": self.rank, "num_tokens": tokens, "topk": top_k,
                          "top_indices": ids_TK.tolist()}
                file.write(json.dumps(record if mtp_idx is None else
                                      {**record, "mtp_idx": mtp_idx}) + "\n")


def _checked(steps: list[list[Tensor]], experts: int, path: Path) -> list[list[Tensor]]:
    for ids_TK in (ids_TK for step in steps for ids_TK in step):
        if ids_TK.numel() and not -1 <= int(ids_TK.min()) <= int(ids_TK.max()) < experts:
            raise ValueError(
                f"routing trace {short(str(path))} has experts {int(ids_TK.min())}.."
                f"{int(ids_TK.max())}: must be in -1..{experts - 1}; give the trace of this model")
    return steps


def trace_of(config: ObserveConfig, layers: Mapping[str, nn.Module],
             rank: int) -> RoutingTrace | None:
    """What `observe.trace` and `observe.replay` ask for; None: neither is set."""
    if not config.trace and not config.replay:
        return None
    return RoutingTrace(layers, rank, write=config.trace, steps=config.trace_steps,
                        replay=config.replay)


def _keep(path: Path, step: int) -> None:
    """Keep a file's records of steps before this one."""
    kept = path.with_name(path.name + ".kept")
    with open(kept, "w", encoding="utf-8") as file:
        if path.exists() and step:
            with open(path, encoding="utf-8", errors="replace") as lines:
                file.writelines(line for line in lines if _is_before(step, line))
    os.replace(kept, path)


def _is_before(step: int, line: str) -> bool:
    try:
        return int(json.loads(line)["step"]) < step
    except (ValueError, KeyError, TypeError):
        return False  # the last line of a run that was killed


@dataclass
class _Replay:
    """Chooses what a trace says, step after step; see `Router.forced`."""

    router: Router
    steps: list[list[Tensor]]
    step: int = 0  # steps that have ended
    passes: int = 0  # of this step

    def __call__(self, call: RoutingCall) -> Tensor | None:
        """The choices of this pass; None: it does not count, and so the trace has none."""
        if self.router.training and inside_backward():
            raise RuntimeError(
                "a recomputation found no recorded routing: with observe.replay recompute by "
                "torch.utils.checkpoint.checkpoint")
        if not counts(self.router.training):
            return None
        step = self._records
        if self.passes == len(step):
            raise self._differs("more")
        ids_TK = step[self.passes]
        shape = call.logits_TE.shape[0], call.k
        if tuple(ids_TK.shape) != shape:
            raise ValueError(
                f"{self._record(self.passes)} is of "
                f"{tuple(ids_TK.shape)} tokens and experts per token, this pass has {shape}: must "
                "be equal; replay the model, micro-batches and layout of the trace")
        self.passes += 1
        complete = not bool((ids_TK < 0).any())  # on the host
        ids_TK = ids_TK.to(call.logits_TE.device)
        if complete:
            return ids_TK
        if bool(((ids_TK < 0).any(1) & call.real_T).any()):
            raise ValueError(
                f"{self._record(self.passes - 1)} has no expert for a token that is no "
                "padding: must name as many for each; replay a trace without dropped choices")
        return ids_TK.clamp(min=0)

    def end_step(self, made: bool) -> None:
        """Go on to the trace's next step; `ValueError` where records of a made one are left."""
        if made and self.passes < len(self._records):
            raise self._differs(str(self.passes))
        self.step, self.passes = self.step + 1, 0

    @property
    def _records(self) -> list[Tensor]:
        return self.steps[self.step % len(self.steps)]

    def _record(self, number: int) -> str:
        return (f"record {number + 1} of a layer in step {self.step % len(self.steps) + 1} of a "
                "routing trace")

    def _differs(self, passes: str) -> ValueError:
        return ValueError(
            f"a layer has {passes} passes in this step, and {len(self._records)} records in step "
            f"{self.step % len(self.steps) + 1} of a routing trace: must be equal; replay the "
            "micro-batches of the trace. Megatron also writes recomputations and evaluations: have "
            "it write one without them, or write it with moe-plugin's router")
