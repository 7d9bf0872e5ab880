"""Arguments of ensembles, with one meaning in every host."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

Flags = tuple[tuple[str, dict[str, Any]], ...]
Check = tuple[bool, str, str, str]  # whether it is good, the argument, its bound, the remedy


@dataclass(frozen=True)
class EnsembleSettings:
    """What the arguments of an ensemble ask for; see `flags`.

    Attributes:
        heads: M.
        hidden: width of a head's own layer.
        sharing: probability that a feature is added to another head's.
        k, beta, labels: see `confident_oracle_loss`.
        by_sequence: what belongs together (a sequence, an image) has the same responsible heads.
    """

    heads: int
    hidden: int = 0
    sharing: float = 0.0
    k: int = 1
    beta: float = 0.75
    labels: str = "exact"
    by_sequence: bool = True


def flags(whole: str, part: str, meaning: str) -> Flags:
    """Names and argparse's options.

    Args:
        whole, part: the two values of `--oracle-unit`, the first is the default.
        meaning: what `whole` is.
    """
    return (
        ("ensemble-heads", {"type": int, "default": 0, "help": "output heads of an ensemble that "
                            "is trained by the confident oracle loss; 0: one output layer"}),
        ("ensemble-hidden", {"type": int, "default": 0,
                             "help": "width of each head's own layer; 0: none"}),
        ("ensemble-sharing", {"type": float, "default": 0.0, "help": "probability that a feature of"
                              " one head's layer is added to another's; 0: none, CMCL: 0.7"}),
        ("oracle-k", {"type": int, "default": 1,
                      "help": f"heads responsible for a {meaning} or {part}"}),
        ("oracle-beta", {"type": float, "default": 0.75,
                         "help": "weight of the other heads' pull to the uniform distribution"}),
        ("oracle-labels", {"choices": ("exact", "stochastic"), "default": "exact", "help":
                           "that pull: its exact gradient, or cross entropy to random labels"}),
        ("oracle-unit", {"choices": (whole, part), "default": whole, "help": "what has responsible "
                         f"heads of its own; {whole}: a {meaning}"}))


def given_settings(args: argparse.Namespace, known: Flags,
                   checks: Iterable[Check] = ()) -> EnsembleSettings | None:
    """The ensemble that parsed arguments ask for; None: one output layer.

    Args:
        known: the host's flags, of `flags` and its own.
        checks: of the host, made where there is an ensemble.
    Raises:
        ValueError: an argument out of bounds, or one that has no effect.
    """
    if not args.ensemble_heads:
        given = [name for name, options in known
                 if getattr(args, name.replace("-", "_")) != options["default"]]
        if given:
            raise ValueError(f"--{given[0]} has no effect without an ensemble: must be left out; "
                             "or give --ensemble-heads, e.g. 5")
        return None
    heads = args.ensemble_heads
    for good, name, bound, remedy in (
        (2 <= heads <= 1024, "ensemble_heads", "in 2..1024", "leave it out for one output layer"),
        (1 <= args.oracle_k <= heads, "oracle_k", f"in 1..{heads}, the heads", "use 1"),
        (0 <= args.oracle_beta < float("inf"), "oracle_beta", ">= 0 and finite", "use 0.75"),
        (0 <= args.ensemble_sharing <= 1, "ensemble_sharing", "in 0..1", "use 0.7"),
        (args.ensemble_hidden >= 0, "ensemble_hidden", ">= 0", "use 0 for none"),
        *checks):
        if not good:
            raise ValueError(f"{name}={getattr(args, name)} is out of bounds: must be {bound}; "
                             f"{remedy}")
    return EnsembleSettings(heads, args.ensemble_hidden, args.ensemble_sharing, args.oracle_k,
                            args.oracle_beta, args.oracle_labels,
                            args.oracle_unit == dict(known)["oracle-unit"]["default"])
