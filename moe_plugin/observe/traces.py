"""Writing, reading and replaying of routing traces, which contain the experts of each token in each
step.

The format is the same as that of Megatron's `--moe-routing-trace-path` in version 0.19 and later.
Each rank writes one file, which is named `router_trace_rank0.jsonl` on rank 0. The file has one
JSON object for each forward pass of a layer in training:

    {"step": 0, "stage": "pre_dispatch", "block": "decoder", "layer": 3, "rank": 0,
     "num_tokens": 128, "topk": 2, "top_indices": [[5, 0], ...]}

`step` is the number of completed steps. `layer` is the index of the layer in the whole model,
whereas Megatron counts the layers of the pipeline stage. Layers of multi-token prediction have the
`block` "mtp" and also `mtp_idx`. Tokens have the same order as in the layer's input. The index -1
stands for no expert and is used for padding and for a dropped second choice.
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
    """Return the path of a rank's trace."""
    return Path(folder, f"router_trace_rank{rank}.jsonl")


def read_trace(path: str | Path) -> dict[Key, list[list[Tensor]]]:
    """Read the choices in a file. The layers are in the order of the model.

    Returns: A list of steps for each layer. Each step is a list of passes, which are int64 tensors
        [T, K] on the host.
    Raises:
        ValueError: If the file cannot be read or is not a trace. The message contains the line
            number.
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
    """Read the traces of all ranks in a folder, in the order of the ranks.

    Raises:
        ValueError: If there is no trace, or if a trace cannot be read.
    """
    files = sorted(Path(folder).glob("router_trace_rank*.jsonl"),
                   key=lambda path: (len(path.name), path.name))
    if not files:
        raise ValueError(f"{short(str(folder))} contains no router_trace_rank*.jsonl. Give the "
                         "folder of a trace, or write a trace with observe.trace, or with "
                         "Megatron's --moe-routing-trace-path")
    return [read_trace(path) for path in files]


class RoutingTrace:
    """An object that writes the choices of layers in training and replays the choices of a
    different trace.

    A pass that is recomputed and a step that is repeated are counted once. Passes that
    torch.compile traces are not written.

    Args:
        layers: modules that contain a `MoELayer` each, in the order of the model. The `Key` of a
            layer is the attribute `trace_key` if it exists, or otherwise the position of the layer.
        rank: the rank of this process.
        write: the folder to which the trace of this run is written. Optional. If the run resumes
            from a checkpoint, records of earlier steps are kept.
        steps: the number of steps that this run records, counted from its first step. If it is 0,
            all steps are recorded.
        replay: the folder of a trace to replay. Optional. Pass `m` of a layer in step `n` uses
            record `m` of step `n` in the trace in place of the router's choice (see
            `Router.forced`). After the last step, the trace is replayed from the start. Layers of
            the trace and of the model are matched by their order.
    Raises:
        ValueError: If a folder cannot be written, or if a trace does not fit these layers.
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
        """Return a function that undoes all later passes, as `StatsRecorder.mark` does."""
        kept, passes = len(self.records), [replay.passes for replay in self.replays]

        def undo() -> None:
            del self.records[kept:]
            for replay, earlier in zip(self.replays, passes, strict=True):
                replay.passes = earlier

        return undo

    def end_step(self, number: int, made: bool = True) -> None:
        """Write the records of a step to the trace.

        Args:
            number: the number of the step, counted from 1.
            made: whether the step was applied to the model. The records of a step that was not
                applied are dropped.
        Raises:
            ValueError: If the replayed trace has more records of this step than passes were made.
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
    """Build the trace for `observe.trace` and `observe.replay`, or None if both are unset."""
    if not config.trace and not config.replay:
        return None
    return RoutingTrace(layers, rank, write=config.trace, steps=config.trace_steps,
                        replay=config.replay)


def _keep(path: Path, step: int) -> None:
    """Keep only the records of earlier steps in a file."""
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
    """A function object that replays the choices of a trace for one router. See `Router.forced`."""

    router: Router
    steps: list[list[Tensor]]
    step: int = 0  # the number of completed steps
    passes: int = 0  # the number of passes in the current step

    def __call__(self, call: RoutingCall) -> Tensor | None:
        """Return the choices for this pass, or None if the pass is not counted."""
        if self.router.training and inside_backward():
            raise RuntimeError(
                "the recomputation of a pass found no recorded routing. With observe.replay, "
                "recompute with torch.utils.checkpoint.checkpoint")
        if not counts(self.router.training):
            return None
        step = self._records
        if self.passes == len(step):
            raise self._differs("more")
        ids_TK = step[self.passes]
        shape = call.logits_TE.shape[0], call.k
        if tuple(ids_TK.shape) != shape:
            raise ValueError(
                f"{self._record(self.passes)} has {tuple(ids_TK.shape)} tokens and experts per "
                f"token, but this pass has {shape}. Replay with the model, the micro-batches and "
                "the layout of the trace")
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
        """Continue with the next step of the trace. Raise `ValueError` if an applied step has
        unused records.
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
