"""`moe-plugin corpus`: write the text corpus of the quick start."""

from __future__ import annotations

import argparse
from pathlib import Path

from moe_plugin.lab.bench.corpus import SPLITS, build_corpus


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder to write to")
    parser.add_argument("--size", type=int, default=4_000_000, metavar="BYTES",
                        help="bytes of all splits together (default: %(default)s)")
    parser.add_argument("--source", type=Path, default=None, metavar="DIR",
                        help="folder of Python files (default: the standard library)")


def run(args: argparse.Namespace) -> int:
    """Write it and say what it holds."""
    info = build_corpus(args.out, size=args.size, source=args.source)
    for split in SPLITS:
        print(f"{args.out / (split + '.txt')}: {info.tokens[split]:,} bytes from "
              f"{info.files[split]} files")
    print(f"unigram entropy {info.unigram_entropy:.3f} nats per byte")
    return 0
