"""Average the weights of several checkpoints of a run, files of several ranks included.

    python -m moe_plugin.hosts.fairseq.average --inputs run/checkpoint_1_100.pt \
        run/checkpoint_1_200.pt --output run/average.pt

fairseq's `scripts/average_checkpoints.py` takes one file of each and adds up all that a model
saves; layers with experts save more than tensors, and each rank has a file of its own.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from moe_plugin.checkpoint import CheckpointError
from moe_plugin.checkpoint.formats.fairseq import files
from moe_plugin.utils.messages import Parser, short
from moe_plugin.utils.quiet import own_log
from moe_plugin.utils.regular_files import check_output, make_folder

logger = logging.getLogger("moe_plugin.hosts.fairseq.average")  # also where it is a command
_SAME = ("num_experts", "world_size", "expert_parallel_size", "rank")


def average(inputs: Sequence[str], output: str) -> list[str]:
    """Write a checkpoint whose weights are the means of these; returns its files.

    Tensors of integers, which count, are the last one's; settings and everything else is the first
    one's, optimizer state is left out.

    Args:
        inputs: checkpoints, with or without the number of a rank.
        output: name without it.
    Raises:
        ValueError: files are missing or damaged, or of other models or numbers of ranks.
    """
    ranks = _files_of(inputs[0])
    others = [_files_of(name) for name in inputs[1:]]
    for name, found in zip(inputs[1:], others, strict=True):
        if len(found) != len(ranks):
            raise ValueError(f"checkpoint {short(name)} has {len(found)} files, {short(inputs[0])} "
                             f"has {len(ranks)}: bring both to the same number of ranks by "
                             "moe-plugin reshard IN OUT --world N")
    written = []
    make_folder(os.path.dirname(os.path.abspath(output)))
    for number, paths in enumerate(zip(ranks, *others, strict=True)):
        target = files.with_rank(output, number) if files.has_rank(paths[0]) else output
        check_output(target)
        files.write(_mean(paths), target)
        written.append(target)
    return written


def _files_of(name: str) -> list[str]:
    """Of all ranks, in their order; a single one where no rank is named."""
    if not files.has_rank(name) and os.path.exists(name):
        return [name]
    stem = files.without_rank(name).removesuffix(".pt")
    paths = [files.with_rank(f"{stem}.pt", rank) for rank in range(len(files.rank_files(name)))]
    missing = [path for path in paths or [name] if not os.path.exists(path)]
    if missing:
        raise ValueError(f"checkpoint {short(name)}: {missing[0]} does not exist; give the paths "
                         "of checkpoints, with or without the number of a rank")
    return paths


def _mean(paths: Sequence[str]) -> dict[str, Any]:
    state = files.read(paths[0])
    files.refuse_branch(paths[0], state)
    sums = {name: value.double() for name, value in state["model"].items() if _is_weight(value)}
    for path in paths[1:]:
        other = files.read(path)
        _check_alike(paths[0], state, path, other)
        for name, total in sums.items():
            total += other["model"][name]
        state["model"] |= {name: value for name, value in other["model"].items()
                           if isinstance(value, torch.Tensor) and not _is_weight(value)}
    for name, total in sums.items():
        state["model"][name] = (total / len(paths)).to(state["model"][name].dtype)
    state.pop("last_optimizer_state", None)
    return state


def _check_alike(first: str, state: Mapping[str, Any], path: str, other: Mapping[str, Any]) -> None:
    for key in _SAME:
        mine, its = ((one.get(files.MANIFEST) or {}).get(key) for one in (state, other))
        if mine != its:
            raise CheckpointError(f"checkpoint {path!r} has {key}={its}, {first!r} has {key}="
                                  f"{mine}: give checkpoints of one run")
    shapes, its_shapes = ({name: tuple(value.shape) for name, value in one["model"].items()
                           if _is_weight(value)} for one in (state, other))
    for name in sorted(shapes.keys() | its_shapes.keys()):
        if shapes.get(name) != its_shapes.get(name):
            raise CheckpointError(
                f"checkpoint {path!r} has {name} of shape {its_shapes.get(name)}, {first!r} has it "
                f"of {shapes.get(name)}: give checkpoints of one run")


def _is_weight(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def options() -> Parser:
    """The command line's."""
    parser = Parser(prog="python -m moe_plugin.hosts.fairseq.average",
                    description="Average the weights of checkpoints of a fairseq run.")
    parser.add_argument("--inputs", required=True, nargs="+", metavar="FILE",
                        help="checkpoints; those of several ranks by their name without the rank")
    parser.add_argument("--output", required=True, metavar="FILE",
                        help="checkpoint to write, with a file for each rank of the inputs")
    parser.add_argument("--trust-checkpoint", action="store_true",
                        help="unpickle classes that are not listed, which can run code")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Command line."""
    parser = options()
    args = parser.parse_args(argv)
    own_log()
    try:
        for path in average(args.inputs, args.output):
            logger.info("%s: average of %d", path, len(args.inputs))
    except ValueError as error:
        parser.error(str(error))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
