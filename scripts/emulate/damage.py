"""Damage the files of a checkpoint between a save and the next start, to test how damaged
checkpoints are loaded.
"""

from __future__ import annotations

import os
import random
import shutil
from pathlib import Path

WAYS = ("cut", "empty", "bit", "byte", "zeros", "missing", "swapped", "folder")
_ZEROS = 512  # bytes of a sector


def files_of(folder: str | os.PathLike[str]) -> list[Path]:
    """Return all files in a folder and its subfolders, sorted by name."""
    return sorted(path for path in Path(folder).rglob("*") if path.is_file())


def damage(path: str | os.PathLike[str], way: str, seed: int = 0) -> str:
    """Damage a file in place.

    Args:
        way: type of damage. `cut` removes at least one byte at the end, `empty` removes all bytes,
            `bit` flips one bit, `byte` changes one byte, `zeros` overwrites a sector with zeros,
            `missing` removes the file, `swapped` replaces the content with the content of another
            file in the folder, and `folder` replaces the file with a folder of the same name.
        seed: seed for the random position.

    Returns: A description of the damage in words.

    Raises:
        ValueError: if the type of damage is unknown, or if the file cannot be damaged in this way.
    """
    path, draw = Path(path), random.Random(seed)
    size = path.stat().st_size
    if way not in WAYS:
        raise ValueError(f"damage {way!r} is unknown. Use one of {', '.join(WAYS)}")
    if size == 0 and way not in ("missing", "folder"):
        raise ValueError(f"{str(path)!r} is already empty. Use way='missing'")
    if way == "missing":
        path.unlink()
        return f"{path.name} removed"
    if way == "folder":
        path.unlink()
        path.mkdir()
        return f"{path.name} became a folder"
    if way == "swapped":
        return _swap(path, draw)
    at = draw.randrange(size)
    if way in ("cut", "empty"):
        os.truncate(path, at if way == "cut" else 0)
        return f"{path.name} cut from {size} to {at if way == 'cut' else 0} bytes"
    with open(path, "r+b") as stream:
        stream.seek(at)
        old = stream.read(_ZEROS if way == "zeros" else 1)
        if way == "zeros":
            new = bytes(len(old)) if any(old) else b"\xff" * len(old)
        else:
            new = bytes([old[0] ^ (1 << draw.randrange(8) if way == "bit" else 0xFF)])
        stream.seek(at)
        stream.write(new)
    return f"{path.name}: {len(new)} byte(s) at {at} changed"


def _swap(path: Path, draw: random.Random) -> str:
    others = [other for other in files_of(path.parent)
              if other != path and other.read_bytes() != path.read_bytes()]
    if not others:
        raise ValueError(f"{str(path.parent)!r} contains no file that differs from {path.name}. "
                         "Use way='bit'")
    other = draw.choice(others)
    shutil.copyfile(other, path)
    return f"{path.name} replaced by a copy of {other.name}"
