"""Build a text corpus without downloading any data. The text of the corpus consists of the source
files of the Python standard library.

The text of the corpus depends only on the Python version. All source files except tests are sorted
by a hash of the file name. Files are added to the corpus in this order until the requested size is
reached. One tenth of the files is assigned to the `valid` split, and another tenth to the `test`
split. Each token is one byte of text. Therefore losses in nats per token can be compared across
hosts, and with the unigram entropy of the text.

| file | content |
|---|---|
| `train.txt`, `valid.txt`, `test.txt` | raw text (input of Megatron's indexed dataset) |
| `train.tok`, `valid.tok`, `test.tok`, `dict.txt` | a token per byte, for `fairseq-preprocess` |
| `corpus.json` | `CorpusInfo` |
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
import platform
import sysconfig
import tokenize
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from moe_plugin.utils.messages import short
from moe_plugin.utils.regular_files import check_output, make_folder, write_regular

SPLITS = ("train", "valid", "test")
_SKIPPED = {
    "test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__", "lib-dynload",
    "encodings", "ensurepip"
}
_LARGEST_FILE = 300_000  # bytes; the few larger files are generated tables
_FORMAT = 1


@dataclass(frozen=True, kw_only=True)
class CorpusInfo:
    """The description of a corpus.

    Attributes:
        size: requested size of the corpus in bytes.
        source: folder from which the text was read, or `stdlib` for the standard library.
        python: version of Python with which the corpus was built.
        files: number of source files in each split.
        tokens: number of tokens in each split.
        unigram_entropy: entropy of the training text in nats per token. This is the loss of a
            language model that predicts each byte with its overall frequency.
        format: version of the file format.
    """

    size: int
    source: str
    python: str
    files: dict[str, int]
    tokens: dict[str, int]
    unigram_entropy: float
    format: int = _FORMAT


def build_corpus(out: Path, *, size: int = 4_000_000, source: Path | None = None) -> CorpusInfo:
    """Write the corpus to the folder `out`, unless the folder already contains a corpus with the
    same size, source and Python version.

    Args:
        out: folder to which the corpus is written. The folder `out` is created if it does not
            exist.
        size: requested total number of bytes in all splits. The corpus is slightly larger than
            requested, because only whole files are added.
        source: folder with Python files. Optional. Defaults to the standard library of the running
            Python interpreter.
    Raises:
        ValueError: If a split would be empty, the folder has no sources, or a file cannot be
            written.
    """
    if size < 1:
        raise ValueError(f"corpus size {size} is out of bounds: it must be >= 1 byte, e.g. 4000000")
    root = source if source is not None else Path(sysconfig.get_path("stdlib"))
    name = "stdlib" if source is None else str(source)
    existing = read_info(out)
    if existing is not None and (existing.size, existing.source, existing.python,
                              existing.format) == (size, name, platform.python_version(), _FORMAT):
        return existing
    texts = _split(_files(root), size, root)
    make_folder(out)
    for file in ("corpus.json", "dict.txt", *(f"{s}.{kind}" for s in SPLITS
                                              for kind in ("txt", "tok"))):
        check_output(out / file)
    # written last, so that a corpus without this file is known to be incomplete
    (out / "corpus.json").unlink(missing_ok=True)
    for split in SPLITS:
        _write(out, split, texts[split])
    write_regular(out / "dict.txt", "".join(
        f"{byte_token(b)} 1\n" for b in range(256) if b != ord("\n")))
    train = b"".join(texts["train"])
    info = CorpusInfo(size=size, source=name, python=platform.python_version(),
                      files={s: len(texts[s]) for s in SPLITS},
                      tokens={s: sum(map(len, texts[s])) for s in SPLITS},
                      unigram_entropy=unigram_entropy(train))
    write_regular(out / "corpus.json", json.dumps(dataclasses.asdict(info), indent=1) + "\n")
    return info


def read_info(out: Path) -> CorpusInfo | None:
    """Return the description of the corpus in `out`, or None if `out` does not contain a complete
    corpus.
    """
    try:
        values = json.loads((out / "corpus.json").read_text())
        complete = all(
            (out / f"{split}.{kind}").is_file() for split in SPLITS for kind in ("txt", "tok"))
        return CorpusInfo(**values) if complete and values.get("format") == _FORMAT else None
    except (OSError, ValueError, TypeError):
        return None


def unigram_entropy(tokens: Iterable[int]) -> float:
    """Return the entropy `-sum(p * ln(p))` in nats per token, where `p` are the relative
    frequencies of the tokens.
    """
    counts = Counter(tokens)
    total = sum(counts.values())
    return -sum(n / total * math.log(n / total) for n in counts.values()) if total else 0.0


def byte_token(byte: int) -> str:
    """Return a byte as one printable token: the character, `▁` for a space, or e.g. `<0x0A>`."""
    if byte == ord(" "):
        return "▁"
    return chr(byte) if 0x21 <= byte <= 0x7E else f"<0x{byte:02X}>"


def token_lines(text: bytes) -> Iterator[str]:
    """For each line of a text, yield its tokens, separated by spaces.

    Line breaks are omitted, because fairseq adds an end-of-sentence token to each line.
    """
    names = [byte_token(b) for b in range(256)]
    for line in text.splitlines():
        yield " ".join(names[b] for b in line)


def _files(root: Path) -> list[Path]:
    """Return all source files below `root` in a reproducible order that shuffles files across
    packages.
    """
    sources = []
    for folder, folders, names in os.walk(root):
        folders[:] = [
            name for name in folders if name not in _SKIPPED and not name.startswith("config-")
        ]
        sources += [Path(folder, name) for name in names if name.endswith(".py")]
    if not sources:
        raise ValueError(
            f"there are no Python sources below {short(str(root))} (some distributions leave them "
            "out). Pass a folder of Python files with --source")
    return sorted(
        sources,
        key=lambda path: hashlib.sha256(path.relative_to(root).as_posix().encode()).hexdigest())


def _split(files: list[Path], size: int, root: Path) -> dict[str, list[bytes]]:
    texts: dict[str, list[bytes]] = {split: [] for split in SPLITS}
    total = index = 0
    for path in files:
        text = _read(path)
        if text:
            texts[{4: "valid", 8: "test"}.get(index % 10, "train")].append(text)
            index, total = index + 1, total + len(text)
        if total >= size:
            break
    empty = [split for split in SPLITS if not texts[split]]
    if empty:
        raise ValueError(
            f"corpus size {size} from {short(str(root))} leaves {', '.join(empty)} empty ({index} "
            "files). Request more bytes, e.g. --size 4000000, or use a larger folder")
    return texts


def _read(path: Path) -> bytes:
    """Read a source file and strip trailing whitespace from its lines. Return an empty string for
    files that must be skipped.
    """
    try:
        if path.stat().st_size > _LARGEST_FILE:
            return b""
        with tokenize.open(path) as stream:
            lines = [line.rstrip().expandtabs(4) for line in stream.read().splitlines()]
    except (OSError, SyntaxError, UnicodeDecodeError):
        return b""
    text = "\n".join(lines).strip("\n")
    return (text + "\n\n").encode() if text else b""


def _write(out: Path, split: str, texts: list[bytes]) -> None:
    write_regular(out / f"{split}.txt", b"".join(texts))
    write_regular(out / f"{split}.tok", "".join(
        line + "\n" for text in texts for line in token_lines(text)))
