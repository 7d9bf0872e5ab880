"""Colours of the plots, and heat maps as small indexed PNG images, without a library."""

from __future__ import annotations

import base64
import math
import struct
import zlib
from collections.abc import Sequence

# told apart also with the common colour deficiencies; (on light, on dark)
CATEGORIES = (("#2a78d6", "#4a94ea"), ("#d9541e", "#f07d4a"), ("#138a63", "#2fbf92"),
              ("#a87400", "#e0ac2b"), ("#6a4fc4", "#a18af0"), ("#c2387f", "#ee76b0"),
              ("#5d6b7a", "#a3b1c0"), ("#8a5a2b", "#c9965f"))
LEVELS = 64  # of the heat maps' palette; index LEVELS: unknown
UNDER, EVEN, OVER, UNKNOWN = ("#2a6fc9", "#5aa2f2"), ("#f1f0ec",
                                                      "#2b2c30"), ("#d63a2f",
                                                                   "#ff7a66"), ("#ffffff",
                                                                                "#17181b")


def level(value: float, top: float) -> int:
    """Palette index of a load over the mean load: the lower half is 0 to 1, the upper 1 to `top`;
    beyond it stays at the end.
    """
    if math.isnan(value):
        return LEVELS
    half = (LEVELS - 1) / 2
    place = half * min(max(value, 0.0),
                       1.0) if value <= 1 else half + half * min(1.0,
                                                                 (value - 1) / max(top - 1, 1e-9))
    return round(place)


def palette(dark: bool) -> list[tuple[int, int, int]]:
    """Red, green, blue of each index, `LEVELS + 1` of them."""
    under, even, over, unknown = (_rgb(pair[dark]) for pair in (UNDER, EVEN, OVER, UNKNOWN))
    half = (LEVELS - 1) / 2
    return [
        _mix(under, even, i / half) if i <= half else _mix(even, over, (i - half) / half)
        for i in range(LEVELS)
    ] + [unknown]


def _rgb(color: str) -> tuple[int, int, int]:
    return int(color[1:3], 16), int(color[3:5], 16), int(color[5:7], 16)


def _mix(a: tuple[int, int, int], b: tuple[int, int, int], t: float) -> tuple[int, int, int]:
    return tuple(round(x + (y - x) * t) for x, y in zip(a, b, strict=True))  # type: ignore[return-value]


def png(rows: Sequence[bytes], dark: bool) -> bytes:
    """An indexed PNG image. rows: palette indices, one byte a pixel, all rows of equal length."""
    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(
            ">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", len(rows[0]), len(rows), 8, 3, 0, 0, 0)
    colors = b"".join(bytes(color) for color in palette(dark))
    pixels = zlib.compress(b"".join(b"\0" + row for row in rows), 9)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"PLTE", colors) + chunk(
        b"IDAT", pixels) + chunk(b"IEND", b"")


def data_uri(image: bytes) -> str:
    """For an `<img>` in the page itself."""
    return "data:image/png;base64," + base64.b64encode(image).decode("ascii")


def top_of(values: Sequence[Sequence[float]]) -> float:
    """The load over the mean at which the palette ends: nearly the largest, at least 2, so that
    single peaks do not wash out the rest.
    """
    known = sorted(v for row in values for v in row if not math.isnan(v))
    return max(2.0, known[min(len(known) - 1, int(0.995 * len(known)))]) if known else 2.0
