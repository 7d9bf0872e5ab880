"""Convert text to Megatron's indexed dataset format (`.bin` and `.idx` files). Each byte of the
text becomes a token.

The vocabulary consists of the 256 byte values and one end-of-document token (256). Any text can be
encoded, and neither a tokenizer file nor a download is needed.

    python -m moe_plugin.hosts.megatron.data --input corpus.txt --output-prefix data/corpus
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from moe_plugin.utils.messages import Parser, short
from moe_plugin.utils.quiet import MEGATRON, hidden, own_log
from moe_plugin.utils.regular_files import check_input, check_output, make_folder, write_remedy

logger = logging.getLogger("moe_plugin.hosts.megatron.data")  # __name__ is "__main__" as a command
BYTE_VOCABULARY = 257


def documents(path: str) -> Iterator[bytes]:
    """Yield the documents of a text file.

    A document is a run of non-empty lines, including their line breaks. Blank lines separate
    documents.

    Raises:
        ValueError: If the file cannot be read.
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
            f"text file {short(path)} cannot be read ({error.strerror}). Pass the path of a text "
            "file.") from error


def write_indexed(texts: Iterable[bytes], prefix: str) -> int:
    """Write documents as byte tokens, with an end-of-document token after each document.

    Both files are written with temporary names and then renamed, so that an interrupted run leaves
    no incomplete dataset.

    Returns: the number of tokens written.

    Raises:
        ValueError: If the input contains no text, or if a file cannot be read or written.
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
    finally:  # also if reading the text failed
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
            f"no text to write to {short(prefix)}: the input is empty. Pass a file with at least "
            "one line of text.")
    builder.finalize(prefix + ".idx.part")
    for suffix in (".bin", ".idx"):
        os.replace(prefix + suffix + ".part", prefix + suffix)
    return tokens


def check_prefix(prefix: str) -> None:
    """Raise a `ValueError` if a file of an indexed dataset is missing or empty."""
    for suffix in (".bin", ".idx"):
        path = prefix + suffix
        if not os.path.isfile(path) or not os.path.getsize(path):
            raise ValueError(
                f"dataset {short(prefix)}: {path} is "
                f"{'empty' if os.path.isfile(path) else 'missing'}. Pass the path without "
                ".bin/.idx, or write the dataset with: python -m moe_plugin.hosts.megatron.data "
                f"--input TEXT --output-prefix {prefix}")


def main(argv: list[str] | None = None) -> int:
    """Run the command line: convert a text file to an indexed dataset."""
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


if __name__ == "__main__":
    raise SystemExit(main())
