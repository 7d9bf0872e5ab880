"""Text to Megatron's indexed dataset (`.bin` + `.idx`), bytes as tokens; and the dataset's batches
for training.

Vocabulary: the 256 bytes and one end-of-document token (256). No tokenizer file, no download,
nothing out of vocabulary.

    python -m moe_plugin.hosts.megatron.data --input corpus.txt --output-prefix data/corpus
"""

from __future__ import annotations

import logging
import os
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moe_plugin.comm import CommError
from moe_plugin.comm.host_collectives import collectives_named
from moe_plugin.messages import Parser, short
from moe_plugin.quiet import MEGATRON, hidden, own_log
from moe_plugin.regular_files import check_input, check_output, make_folder, write_remedy

logger = logging.getLogger("moe_plugin.hosts.megatron.data")  # also where it is a command
BYTE_VOCABULARY = 257


@dataclass(frozen=True)
class DatasetTokenizer:
    """What Megatron's datasets ask of a tokenizer: bytes are tokens, or the dataset was made by
    another one, of which the vocabulary's size is known.
    """

    vocab_size: int = BYTE_VOCABULARY
    pad = -1  # no padding token: GPTDataset fills the only short sample, and masks it, with this

    @property
    def eod(self) -> int:
        """The token that ends a document."""
        return self.vocab_size - 1

    @property
    def unique_identifiers(self) -> OrderedDict[str, str]:
        """Goes into the key of the dataset's index cache."""
        return OrderedDict(class_="moe_plugin.IntegerTokenizer", vocab_size=str(self.vocab_size))


def tokenizer_of(args: Any) -> DatasetTokenizer:
    """The tokenizer that the training script's arguments name."""
    return DatasetTokenizer(args.vocab_size or BYTE_VOCABULARY)


def documents(path: str) -> Iterator[bytes]:
    """The documents of a text file: runs of lines between blank lines, each with its line breaks.

    Raises:
        ValueError: the file cannot be read.
    """
    check_input(path, "text file", "give the path of a text file")
    try:
        with open(path, "rb") as stream:
            lines: list[bytes] = []
            for line in stream:
                if line.strip():
                    lines.append(line)
                elif lines:
                    yield b"".join(lines)
                    lines = []
            if lines:
                yield b"".join(lines)
    except OSError as error:
        raise ValueError(
            f"text file {short(path)} cannot be read ({error.strerror}); give the path of a text "
            "file") from error


def write_indexed(texts: Iterable[bytes], prefix: str) -> int:
    """Write documents as byte tokens, each with an end-of-document token.

    Returns the number of tokens.

    The two files appear complete or not at all: they are written under another name and renamed.

    Raises:
        ValueError: no text, or a file that cannot be written.
    """
    make_folder(os.path.dirname(os.path.abspath(prefix)))
    for suffix in (".bin", ".idx", ".bin.part", ".idx.part"):
        check_output(prefix + suffix)
    try:
        return _write_indexed(texts, prefix)
    except OSError as error:
        raise ValueError(
            f"{prefix}.bin cannot be written ({error.strerror}); "
            f"{write_remedy(error, os.path.dirname(os.path.abspath(prefix)))}") from error
    finally:  # whatever went wrong, also in reading the text
        for suffix in (".bin.part", ".idx.part"):
            Path(prefix + suffix).unlink(missing_ok=True)


def _write_indexed(texts: Iterable[bytes], prefix: str) -> int:
    import numpy as np

    from moe_plugin.hosts.megatron.compat.names import IndexedDatasetBuilder

    builder = IndexedDatasetBuilder(prefix + ".bin.part", dtype=np.uint16)
    tokens = 0
    for text in texts:
        ids = np.append(
            np.frombuffer(text, dtype=np.uint8).astype(np.uint16), np.uint16(BYTE_VOCABULARY - 1))
        builder.add_document(ids, [len(ids)])
        tokens += len(ids)
    if not tokens:
        raise ValueError(
            f"no text to write to {short(prefix)}: the input is empty; give a file with at least "
            "one line")
    builder.finalize(prefix + ".idx.part")
    for suffix in (".bin", ".idx"):
        os.replace(prefix + suffix + ".part", prefix + suffix)
    return tokens


def check_prefix(prefix: str) -> None:
    """`ValueError` where one of the two files of an indexed dataset is missing or empty."""
    for suffix in (".bin", ".idx"):
        path = prefix + suffix
        if not os.path.isfile(path) or not os.path.getsize(path):
            raise ValueError(
                f"dataset {short(prefix)}: {path} is "
                f"{'empty' if os.path.isfile(path) else 'missing'}; give the path "
                "without .bin/.idx, or write it with: python -m moe_plugin.hosts.megatron.data "
                "--input "
                f"TEXT --output-prefix {prefix}")


@dataclass(frozen=True)
class Batch:
    """One micro-batch: tokens, labels, positions int64 [B, S], loss_mask float32 [B, S]."""

    tokens: Tensor
    labels: Tensor
    loss_mask: Tensor
    positions: Tensor


def build_dataset(prefix: str, *, sequence_length: int, samples: int, seed: int, tokenizer: Any,
                  split: str, cache_dir: str | None) -> tuple[Any, Any]:
    """(training set, validation set or None) as Megatron's `GPTDataset`s.

    The default group must be initialized.

    Raises:
        ValueError: missing or empty files, or fewer tokens than one sequence needs.
        CommError: another rank failed.
    """
    from moe_plugin.hosts.megatron.compat.names import (
        BlendedMegatronDatasetBuilder,
        GPTDataset,
        GPTDatasetConfig,
    )

    check_prefix(prefix)
    config = GPTDatasetConfig(
        random_seed=seed, sequence_length=sequence_length, blend=([prefix], None), split=split,
        tokenizer=tokenizer, path_to_cache=cache_dir, reset_position_ids=False,
        reset_attention_mask=False, eod_mask_loss=False, create_attention_mask=False,
    )
    try:
        with collectives_named("a collective of Megatron's dataset builder"):
            train, valid, _ = BlendedMegatronDatasetBuilder(GPTDataset, [samples, None, None],
                                                            lambda: True, config).build()
    except CommError:
        raise
    except (AssertionError, IndexError, RuntimeError, ZeroDivisionError) as error:
        raise ValueError(
            f"dataset {short(prefix)} gives no training samples of {sequence_length} tokens "
            f"({short(error)}); use a "
            "longer text, a shorter --seq-length, or another --split") from error
    return train, valid


def batches(dataset: Any, *, start: int, micro_batch_size: int, replica: int, replicas: int,
            device: torch.device) -> Iterator[Batch]:
    """Micro-batches of one data-parallel replica from sample number `start` on.

    The samples of all replicas together are in order.

    Micro-batch i of replica r takes the samples start + (i * replicas + r) * micro_batch_size and
    following, modulo the dataset's length, so that a resumed run sees what an unbroken one would.
    """
    position = start + replica * micro_batch_size
    while True:
        rows = [dataset[(position + i) % len(dataset)] for i in range(micro_batch_size)]
        yield Batch(*(torch.stack([row[name] for row in rows]).to(device)
                      for name in ("tokens", "labels", "loss_mask", "position_ids")))
        position += replicas * micro_batch_size


def main(argv: list[str] | None = None) -> int:
    """Command line: write an indexed dataset from a text file."""
    parser = Parser(prog="python -m moe_plugin.hosts.megatron.data", description=main.__doc__)
    parser.add_argument("--input", required=True, help="text file; blank lines separate documents")
    parser.add_argument("--output-prefix", required=True,
                        help="path of the dataset without .bin/.idx")
    args = parser.parse_args(argv)
    own_log()
    try:
        with hidden(MEGATRON):
            tokens = write_indexed(documents(args.input), args.output_prefix)
    except ValueError as error:
        parser.error(str(error))
    logger.info("%s.bin, %s.idx: %d tokens, vocabulary %d", args.output_prefix, args.output_prefix,
                tokens, BYTE_VOCABULARY)
    return 0
