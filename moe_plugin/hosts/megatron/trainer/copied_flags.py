"""Flags in launch scripts that were written for Megatron's own training script, which ours takes so
that they need no change: forms of values, flags without effect here, and what replaces others.
"""

from __future__ import annotations

import argparse
import ast
import logging
from typing import Any

from moe_plugin.messages import Parser, alike, flag_names, short

logger = logging.getLogger("moe_plugin.megatron")

_MOST_LAYERS = _MOST_CHARACTERS = 10**4
BALANCE = ("aux_loss", "seq_aux_loss", "global_aux_loss", "sinkhorn", "quantile_balancing", "none")
NATIVE_MOE = ("moe-grouped-gemm", "moe-permute-fusion", "moe-router-fusion")
_SWITCHES = (
    *NATIVE_MOE, "moe-use-legacy-grouped-gemm", "moe-enable-deepep", "moe-per-layer-logging",
    "use-mcore-models", "use-flash-attn", "attention-softmax-in-fp32", "no-masked-softmax-fusion",
    "no-bias-gelu-fusion", "no-bias-swiglu-fusion", "no-bias-dropout-fusion", "no-rope-fusion",
    "no-persist-layer-norm", "no-gradient-accumulation-fusion", "cross-entropy-loss-fusion",
    "no-check-for-nan-in-loss-and-grad", "no-create-attention-mask-in-dataloader",
    "no-mmap-bin-files", "tp-comm-overlap", "manual-gc", "log-throughput", "use-cpu-initialization")
_VALUES = ("moe-flex-dispatcher-backend", "moe-deepep-num-sms", "cross-entropy-fusion-impl",
           "attention-backend", "transformer-impl", "distributed-backend", "manual-gc-interval",
           "num-workers")
WITHOUT_EFFECT: tuple[tuple[str, dict[str, Any]], ...] = (
    *((name, {"action": "store_true", "help": argparse.SUPPRESS}) for name in _SWITCHES),
    *((name, {"help": argparse.SUPPRESS}) for name in _VALUES))
_TOKENIZER = ("give the data of Megatron's preprocessing with --data-path, and the tokenizer's "
              "number of tokens with --vocab-size")
_INSTEAD = {
    "--tokenizer-type": _TOKENIZER, "--tokenizer-model": _TOKENIZER, "--vocab-file": _TOKENIZER,
    "--merge-file": _TOKENIZER,
    "--make-vocab-size-divisible-by": "leave it out: vocabularies are padded to multiples of 128",
    "--tensorboard-dir": "use --moe-stats-tensorboard FOLDER",
    "--wandb-project": "use --moe-stats-wandb", "--train-samples": "use --train-iters",
    "--lr-warmup-samples": "use --lr-warmup-iters", "--lr-warmup-fraction": "use --lr-warmup-iters",
    "--lr-decay-samples": "use --lr-decay-iters",
    "--num-layers-per-virtual-pipeline-stage": "use --num-virtual-stages-per-pipeline-rank",
    "--moe-layer-recompute": "use --recompute-granularity selective --recompute-modules moe",
    "--no-position-embedding": "use --position-embedding-type rope",
    "--use-rotary-position-embeddings": "use --position-embedding-type rope",
    "--mock-data": "make data of a text: python -m moe_plugin.hosts.megatron.data",
    "--fp8-format": "use --bf16, and --moe-expert-precision fp8 for the experts' products",
    "--use-checkpoint-args": "give the arguments of the run that saved it",
}
_OTHER_SCRIPT = ("if {} is meant for Megatron's own script, which has more arguments than this "
                 "one, leave it out, or start that script by python -m "
                 "moe_plugin.hosts.megatron.launch (docs/megatron.md)")


class CopiedParser(Parser):
    """A parser whose errors say what replaces Megatron's flags that it does not have."""

    def unknown(self) -> list[str]:
        """As `Parser`'s, without what something replaces."""
        return [name for name in super().unknown() if name not in _INSTEAD]

    def remedies(self, message: str) -> list[str]:
        """As `Parser`'s, with what replaces flags of Megatron's script: `argparse` names a required
        flag that is missing before the one of Megatron's given in its place.
        """
        known, replaced = self.flags(), dict[str, list[str]]()
        for name in flag_names(self.given):
            if name in _INSTEAD:
                replaced.setdefault(_INSTEAD[name], []).append(name)
        other = [name for name in self.unknown() if not alike(name, known)][:3]
        return [*super().remedies(message),
                *([_OTHER_SCRIPT.format(", ".join(other))] if other else []),
                *(f"in place of {', '.join(names)}: {hint}" for hint, names in replaced.items())]


class OneOrMore(argparse.Action):
    """A single value as itself, several as a list, as Megatron's settings have them."""

    def __call__(self, parser: argparse.ArgumentParser, namespace: argparse.Namespace,
                 values: Any, option_string: str | None = None) -> None:
        """Store them."""
        setattr(namespace, self.dest, values[0] if len(values) == 1 else values)


def layer_freq(text: str) -> int | list[int]:
    """Which layers have experts: every so many, or 0 and 1 for each layer: `0,1,0,1`, or Megatron's
    form of it: `([0]+[1]*3)`.
    """
    text = text.strip()
    if len(text) > _MOST_CHARACTERS:
        raise _long_layers(text)
    try:
        listed = f"[{text}]" if "," in text and "[" not in text else text
        pattern = _layers(ast.parse(listed, mode="eval").body)
    except (SyntaxError, ValueError):
        raise _bad_layers(text) from None
    except (MemoryError, RecursionError):
        raise _long_layers(text) from None
    if isinstance(pattern, list) and any(layer not in (0, 1) for layer in pattern):
        raise _bad_layers(text)
    return pattern


def _layers(node: ast.expr) -> Any:
    """The number or list that an expression gives; `ValueError` for any other."""
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.List):
        return [_layers(element) for element in node.elts]
    if not isinstance(node, ast.BinOp):
        raise ValueError
    left, right = _layers(node.left), _layers(node.right)
    if isinstance(left, int):
        left, right = right, left
    if isinstance(node.op, ast.Add) and isinstance(left, list) and isinstance(right, list):
        length = len(left) + len(right)
    elif isinstance(node.op, ast.Mult) and isinstance(left, list) and isinstance(right, int):
        length = len(left) * right
    else:
        raise ValueError
    if length > _MOST_LAYERS:
        raise ValueError
    return left + right if isinstance(node.op, ast.Add) else left * right


def _bad_layers(text: str) -> argparse.ArgumentTypeError:
    return argparse.ArgumentTypeError(
        f"{short(text)} is neither a number n >= 1 (every n-th layer has experts) nor 0 or 1 for "
        "each layer, as 0,1,0,1 or ([0]+[1]*3)")


def _long_layers(text: str) -> argparse.ArgumentTypeError:
    return argparse.ArgumentTypeError(
        f"{short(text)} is too long: must be at most {_MOST_CHARACTERS} characters and a few "
        "hundred terms; write [1]*3 for [1]+[1]+[1]")


def recompute_granularity(args: argparse.Namespace) -> str | None:
    """What these arguments choose: --recompute-activations wins, as in Megatron's script."""
    if getattr(args, "recompute_activations", False):
        return "selective"
    chosen: str | None = args.recompute_granularity
    return chosen


def follow(args: argparse.Namespace) -> None:
    """Do what Megatron's script does with these arguments after it has read them, and log which
    have no effect.
    """
    if args.sequence_parallel and args.tensor_model_parallel_size == 1 and not args.stage_layouts:
        logger.info("--sequence-parallel is left out: there is one tensor-parallel rank")
        args.sequence_parallel = False
    args.recompute_granularity = recompute_granularity(args)
    given = [f"--{name}" for name, _ in WITHOUT_EFFECT
             if getattr(args, name.replace("-", "_")) not in (False, None)
             and not (args.native_moe and name in NATIVE_MOE)]
    if args.moe_token_dispatcher_type == "flex" and not args.native_moe:
        given.append("--moe-token-dispatcher-type flex")
    if given:
        logger.info("Megatron's arguments that choose implementations of its own and have no "
                    "effect in this script: %s", " ".join(given))
