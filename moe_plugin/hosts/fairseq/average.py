"""Average the weights of several checkpoints of a run. A checkpoint can have one file per rank.

    python -m moe_plugin.hosts.fairseq.average --inputs run/checkpoint_1_100.pt \
        run/checkpoint_1_200.pt --output run/average.pt

fairseq's `scripts/average_checkpoints.py` cannot be used, because it reads only one file per
checkpoint and averages every saved value. In a model with MoE layers, some of the saved values are
not tensors, and each rank writes its own file.
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

logger = logging.getLogger("moe_plugin.hosts.fairseq.average")  # `__name__` is different with -m
_SAME = ("num_experts", "world_size", "expert_parallel_size", "rank")


def average(inputs: Sequence[str], output: str) -> list[str]:
    """Average the weights of several checkpoints, and write the mean to a new checkpoint.

    Integer tensors contain counts, and are copied from the last checkpoint. The settings and all
    other values are copied from the first checkpoint. The optimizer state is left out.

    Args:
        inputs: paths of the checkpoints. A path may include the rank suffix `-rank-N`.
        output: path of the new checkpoint, without a rank suffix.
    Returns: the paths of the files that were written.
    Raises:
        ValueError: If files are missing or damaged, or if the checkpoints belong to different
            models or have different numbers of ranks.
    """
    ranks = _files_of(inputs[0])
    others = [_files_of(name) for name in inputs[1:]]
    for name, rank_paths in zip(inputs[1:], others, strict=True):
        if len(rank_paths) != len(ranks):
            raise ValueError(f"checkpoint {short(name)} has {len(rank_paths)} files, but "
                             f"{short(inputs[0])} has {len(ranks)}. Convert both to the same "
                             "number of ranks with moe-plugin reshard IN OUT --world N")
    written = []
    make_folder(os.path.dirname(os.path.abspath(output)))
    for number, paths in enumerate(zip(ranks, *others, strict=True)):
        target = files.with_rank(output, number) if files.has_rank(paths[0]) else output
        check_output(target)
        files.write(_mean(paths), target)
        written.append(target)
    return written


def _files_of(name: str) -> list[str]:
    """Return the files of a checkpoint, which may be a single file, ordered by rank."""
    if not files.has_rank(name) and os.path.exists(name):
        return [name]
    stem = files.without_rank(name).removesuffix(".pt")
    paths = [files.with_rank(f"{stem}.pt", rank) for rank in range(len(files.rank_files(name)))]
    missing = [path for path in paths or [name] if not os.path.exists(path)]
    if missing:
        raise ValueError(f"file {missing[0]} of checkpoint {short(name)} does not exist. Pass the "
                         "paths of checkpoints, with or without a rank suffix")
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
        expected, its = ((saved.get(files.MANIFEST) or {}).get(key) for saved in (state, other))
        if expected != its:
            raise CheckpointError(f"checkpoint {path!r} has {key}={its}, but {first!r} has {key}="
                                  f"{expected}. Use checkpoints of the same run")
    shapes, its_shapes = ({name: tuple(value.shape) for name, value in saved["model"].items()
                           if _is_weight(value)} for saved in (state, other))
    for name in sorted(shapes.keys() | its_shapes.keys()):
        if shapes.get(name) != its_shapes.get(name):
            raise CheckpointError(
                f"checkpoint {path!r} has {name} with the shape {its_shapes.get(name)}, but in "
                f"{first!r} the shape is {shapes.get(name)}. Use checkpoints of the same run")


def _is_weight(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def options() -> Parser:
    """Build the command-line parser."""
    parser = Parser(prog="python -m moe_plugin.hosts.fairseq.average",
                    description="Average the weights of checkpoints of a fairseq run.")
    parser.add_argument("--inputs", required=True, nargs="+", metavar="FILE",
                        help="checkpoints to average; for several ranks, names without the rank")
    parser.add_argument("--output", required=True, metavar="FILE",
                        help="checkpoint to write, with a file for each rank of the inputs")
    parser.add_argument("--trust-checkpoint", action="store_true",
                        help="also unpickle classes that are not listed as safe, which can run "
                        "code from the file")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit status."""
    parser = options()
    args = parser.parse_args(argv)
    own_log()
    try:
        for path in average(args.inputs, args.output):
            logger.info("%s: average of %d checkpoints", path, len(args.inputs))
    except ValueError as error:
        parser.error(str(error))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
