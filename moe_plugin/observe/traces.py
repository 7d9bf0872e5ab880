"""Write, read and replay routing traces, which contain the chosen experts of each token in each
step.

The file format is that of `--moe-routing-trace-path` in Megatron 0.19 and later. Each rank writes
one trace file. The file of rank 0 is named `router_trace_rank0.jsonl`. A trace file contains one
JSON object for each forward pass of a layer during training:

    {"step": 0, "stage": "pre_dispatch", "block": "decoder", "layer": 3, "rank": 0,
     "num_tokens": 128, "topk": 2, "top_indices": [[5, 0], ...]}

`step` is the number of steps that were completed before this pass. `layer` is the index of the
layer in the whole model. In Megatron's own traces, `layer` is the index within the pipeline stage.
Layers for multi-token prediction have the `block` "mtp" and an additional field `mtp_idx`. The
tokens in `top_indices` are in the same order as in the layer's input. An expert index of -1 means
that no expert was chosen, as for padding and dropped second choices.
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
from moe_plugin.routing.counting import counts
from moe_plugin.routing.rollouts import check_replaceable
from moe_plugin.utils.machine import inside_backward
from moe_plugin.utils.messages import short
from moe_plugin.utils.regular_files import check_input, check_output, make_folder

Key = tuple[str, int | None, int]  # block, mtp_idx, layer


def trace_path(folder: str, rank: int) -> Path:
    """Return the path of the trace file of a rank."""
    return Path(folder, f"router_trace_rank{rank}.jsonl")


def read_trace(path: str | Path) -> dict[Key, list[list[Tensor]]]:
    """Read the chosen experts from the trace file of one rank. The layers in the returned dict are
    ordered as in the model.

    Returns: For each layer, a list of steps. Each step is a list of passes, and each pass is an
        int64 tensor [T, K] on the CPU.
    Raises:
        ValueError: If the file cannot be read or is not a trace. The error message contains the
            line number.
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
                raise ValueError(
                    f"routing trace {short(str(path))}, line {number} is not a record in "
                    f"Megatron's format: {short(error)}. Write the trace again") from error
    in_order = sorted(found, key=lambda key: (key[0] != "decoder", key[1] or 0, key[2]))
    return {key: [found[key][step] for step in sorted(found[key])] for key in in_order}


def read_traces(folder: str | Path) -> list[dict[Key, list[list[Tensor]]]]:
    """Read the traces of all ranks from a folder, ordered by rank.

    Raises:
        ValueError: If the folder contains no trace, or if a trace cannot be read.
    """
    files = sorted(Path(folder).glob("router_trace_rank*.jsonl"),
                   key=lambda path: (len(path.name), path.name))
    if not files:
        raise ValueError(f"{short(str(folder))} contains no router_trace_rank*.jsonl. Pass the "
                         "folder of a trace, or write a trace with observe.trace, or with "
                         "Megatron's --moe-routing-trace-path")
    return [read_trace(path) for path in files]


class RoutingTrace:
    """During training, write the chosen experts to a trace, or replay the choices of an earlier
    trace.

    Recomputed passes and repeated steps are counted only once. Passes during which torch.compile
    traces the model are not written.

    Args:
        layers: modules that each contain one `MoELayer`, ordered as in the model. The `Key` of a
            layer is its attribute `trace_key` if it exists, and otherwise its index.
        write: the folder to which the trace of this run is written. Optional. If the run resumes
            from a checkpoint, the trace of earlier steps is preserved.
        steps: the number of steps to record, starting with the first step of this run. If 0, all
            steps of the run are recorded.
        replay: the folder of a trace to replay. Optional. In pass `m` of step `n`, a layer uses
            record `m` of step `n` of the trace instead of its router's choice (see
            `Router.forced`). After the last step of the trace, the replay restarts from the first
            step. Layers of the trace and of the model are matched by their order.
    Raises:
        ValueError: If a folder cannot be written, or if a trace does not match these layers.
    """

    def __init__(self, layers: Mapping[str, nn.Module], rank: int, *, write: str | None = None,
                 steps: int = 0, replay: str | None = None) -> None:
        self.rank, self.steps, self.ended = rank, steps, 0
        self.path = None if write is None else trace_path(write, rank)
        self.records: list[tuple[Key, Tensor]] = []  # the passes of the current step
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
            raise ValueError(f"routing trace {short(str(path))} has {len(trace)} layers, but this "
                             f"rank has {len(moes)}. Pass a trace of the same model in the same "
                             "parallel layout")
        for moe, steps in zip(moes, trace.values(), strict=True):
            router: Any = moe.router
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
        """Return a function that discards all later passes, as in `StatsRecorder.mark`."""
        kept, passes = len(self.records), [replay.passes for replay in self.replays]

        def undo() -> None:
            del self.records[kept:]
            for replay, earlier in zip(self.replays, passes, strict=True):
                replay.passes = earlier

        return undo

    def end_step(self, number: int, made: bool = True) -> None:
        """Write the records of the current step to the trace.

        Args:
            number: the number of the step, counted from 1.
            made: whether the optimizer has applied the step to the model. If False, the records of
                the step are discarded.
        Raises:
            ValueError: If the layers made fewer passes in this step than the replayed trace
                contains.
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
                f"{int(ids_TK.max())}, which must be in -1..{experts - 1}. Pass a trace of this "
                "model")
    return steps


def trace_of(config: ObserveConfig, layers: Mapping[str, nn.Module],
             rank: int) -> RoutingTrace | None:
    """Create the trace object for `observe.trace` and `observe.replay`. Return None if both
    settings are unset.
    """
    if not config.trace and not config.replay:
        return None
    return RoutingTrace(layers, rank, write=config.trace, steps=config.trace_steps,
                        replay=config.replay)


def _keep(path: Path, step: int) -> None:
    """Remove the records of the given step and of all later steps from a trace file."""
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
        return False  # an unfinished last line of a run that was killed


@dataclass
class _Replay:
    """A callable that replays the choices in a trace for one router. See `Router.forced`."""

    router: Router
    steps: list[list[Tensor]]
    step: int = 0  # the number of completed steps
    passes: int = 0  # the number of passes in the current step

    def __call__(self, call: RoutingCall) -> Tensor | None:
        """Return the chosen experts for this pass, or None if this is not a training pass or must
        not be counted.
        """
        if self.router.training and inside_backward():
            raise RuntimeError(
                "a forward pass was recomputed, but its routing was not recorded. With "
                "observe.replay, use torch.utils.checkpoint.checkpoint to recompute activations")
        if not counts(self.router.training):
            return None
        step = self._records
        if self.passes == len(step):
            raise self._differs("more")
        ids_TK = step[self.passes]
        shape = call.logits_TE.shape[0], call.k
        if tuple(ids_TK.shape) != shape:
            raise ValueError(
                f"{self._record(self.passes)} has {tuple(ids_TK.shape)} (tokens, experts per "
                f"token), but this pass has {shape}. Use the same model, micro-batches and "
                "parallel layout as the run that wrote the trace")
        self.passes += 1
        complete = not bool((ids_TK < 0).any())  # ids_TK is on the host, so nothing waits
        ids_TK = ids_TK.to(call.logits_TE.device)
        if complete:
            return ids_TK
        if bool(((ids_TK < 0).any(1) & call.real_T).any()):
            raise ValueError(
                f"{self._record(self.passes - 1)} has no expert for a token that is not padding. "
                "Replay a trace without dropped choices")
        return ids_TK.clamp(min=0)

    def end_step(self, made: bool) -> None:
        """Advance to the next step of the replayed trace. Raise `ValueError` if the optimizer
        applied the step but the layer did not use all records of the trace's step.
        """
        if made and self.passes < len(self._records):
            raise self._differs(str(self.passes))
        self.step, self.passes = self.step + 1, 0

    @property
    def _records(self) -> list[Tensor]:
        return self.steps[self.step % len(self.steps)]

    def _record(self, number: int) -> str:
        return (f"record {number + 1} of a layer in step {self.step % len(self.steps) + 1} of the "
                "routing trace")

    def _differs(self, passes: str) -> ValueError:
        return ValueError(
            f"a layer has {passes} passes in this step, but {len(self._records)} records in step "
            f"{self.step % len(self.steps) + 1} of the routing trace. Replay with the "
            "micro-batches of the trace. Megatron also records recomputations and evaluations, so "
            "write its trace without them, or write the trace with moe-plugin's router")
