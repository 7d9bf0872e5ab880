"""Text to train on, drawn from a seed: no edit of the repository changes what is learned."""

from __future__ import annotations

import random


def sentence(draw: random.Random) -> str:
    """4 to 14 of 40 words; the next word is one of three that follow from the last one."""
    word, words = draw.randint(0, 20), []
    for _ in range(draw.randint(4, 14)):
        words.append(f"w{word}")
        word = (word * 3 + draw.randint(0, 2)) % 40
    return " ".join(words)


def sentences(count: int, seed: int = 0) -> list[str]:
    """So many sentences."""
    draw = random.Random(seed)
    return [sentence(draw) for _ in range(count)]


def documents(count: int, seed: int = 0) -> str:
    """Documents of 40 sentences in words of letters, an empty line between two; about 2,000 bytes
    each.
    """
    draw = random.Random(seed)
    letters = "etaoinshrdlucmfwypvbgk"
    spelled = {f"w{i}": "".join(draw.choices(letters, range(len(letters), 0, -1),
                                             k=draw.randint(2, 8))) for i in range(40)}
    lines = [" ".join(spelled[word] for word in sentence(draw).split()) for _ in range(40 * count)]
    return "\n\n".join("\n".join(lines[i:i + 40]) for i in range(0, len(lines), 40)) + "\n"
