"""The corpus: same text every time, complete or not there, tokens that are its bytes."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from moe_plugin.cli.corpus import (
    SPLITS,
    build_corpus,
    byte_token,
    read_info,
    unigram_entropy,
)
from moe_plugin.cli.main import main

pytestmark = pytest.mark.fast

SIZE = 300_000


def text_from_tokens(line: str) -> bytes:
    """The inverse of `token_lines` for one line, e.g. of a generated sample."""
    values = {byte_token(b): b for b in range(256)}
    return bytes(values[token] for token in line.split())


def test_same_text_every_time_and_disjoint_splits(tmp_path: Path) -> None:
    first, second = (build_corpus(tmp_path / name, size=SIZE) for name in ("a", "b"))
    assert first == second
    texts = {split: (tmp_path / "a" / f"{split}.txt").read_bytes() for split in SPLITS}
    for split, text in texts.items():
        assert text == (tmp_path / "b" / f"{split}.txt").read_bytes()
        assert len(text) == first.tokens[split] > 1000
    assert SIZE <= sum(first.tokens.values()) < 2 * SIZE + 300_000
    assert texts["valid"][:500] not in texts["train"] and texts["test"][:500] not in texts["train"]
    assert b"def " in texts["train"]


def test_tokens_are_the_bytes_of_the_text(tmp_path: Path) -> None:
    build_corpus(tmp_path, size=SIZE)
    lines = (tmp_path / "valid.tok").read_text(encoding="utf-8").splitlines()
    assert b"".join(text_from_tokens(line) + b"\n"
                    for line in lines) == (tmp_path / "valid.txt").read_bytes()
    known = {
        line.split()[0]
        for line in (tmp_path / "dict.txt").read_text(encoding="utf-8").splitlines()
    }
    assert len(known) == 255 and {token for line in lines for token in line.split()} <= known


def test_tokens_of_all_bytes_differ() -> None:
    tokens = [byte_token(b) for b in range(256)]
    assert len(set(tokens)) == 256 and all(token.split() == [token] for token in tokens)


def test_a_finished_corpus_is_kept_and_a_broken_one_made_again(tmp_path: Path) -> None:
    info = build_corpus(tmp_path, size=SIZE)
    stamp = (tmp_path / "train.txt").stat().st_mtime_ns
    assert build_corpus(tmp_path,
                        size=SIZE) == info and (tmp_path / "train.txt").stat().st_mtime_ns == stamp
    (tmp_path / "valid.tok").unlink()
    assert read_info(tmp_path) is None
    assert build_corpus(tmp_path, size=SIZE) == info and (tmp_path / "valid.tok").is_file()
    (tmp_path / "corpus.json").write_text("{broken")
    assert build_corpus(tmp_path, size=SIZE) == info


def test_unigram_entropy() -> None:
    assert unigram_entropy(b"aabb") == pytest.approx(math.log(2))
    assert unigram_entropy(b"aaaa") == 0 and unigram_entropy(b"") == 0


def test_clear_errors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match="no Python sources"):
        build_corpus(tmp_path / "out", source=tmp_path)
    with pytest.raises(ValueError, match="leaves valid, test empty"):
        build_corpus(tmp_path / "out", size=10)
    assert main(["corpus", "--out", str(tmp_path / "out"), "--size", "0"]) == 2
    assert "must be >= 1 byte" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["corpus", "--out", str(tmp_path), "--size", str(SIZE)]) == 0
    assert "unigram entropy" in capsys.readouterr().out
