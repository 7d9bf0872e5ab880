"""`moe-plugin configs`: the YAML files that are installed with the package."""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path

from moe_plugin.utils.messages import aligned, alike, did_you_mean, short
from moe_plugin.utils.yaml_file import bundled

TOP = "configs"
_SENTENCE = re.compile(r"(.*?)(?<! al)\.(?: |$)")


def configs_options(p: argparse.ArgumentParser) -> None:
    """`moe-plugin configs`."""
    p.description = ("Lists the files of settings, models, clusters, devices and networks that are "
                     "installed, or prints one. Every option that takes a file finds it by its "
                     "name, from any folder, unless a file of that name is there: "
                     "`--moe-config configs/moe/switch.yaml`.")
    p.add_argument("name", metavar="NAME", nargs="?",
                   help="a file's name, or a folder's, as they are listed; a file is printed")
    p.add_argument("--json", action="store_true",
                   help="print one JSON object: what each file is, or the file's text, by name")


def configs(args: argparse.Namespace) -> int:
    """List, or print."""
    wanted = str(Path(TOP, (args.name or "").removeprefix(f"{TOP}/").removeprefix(TOP)))
    found = {name: path for name, path in _files().items()
             if name == wanted or name.startswith(f"{wanted}/")}
    if not found:
        raise ValueError(f"there is no file {short(args.name)}; {did_you_mean(_near(wanted))}"
                         "`moe-plugin configs` lists all of them")
    texts = {name: path.read_text(encoding="utf-8") for name, path in found.items()}
    if wanted in texts:
        print(json.dumps(texts, indent=1) if args.json else texts[wanted].rstrip("\n"))
        return 0
    about = {name: summary(text) for name, text in texts.items()}
    print(json.dumps(about, indent=1) if args.json else aligned(list(about.items())))
    return 0


def _files() -> dict[str, Path]:
    folder = Path(bundled(Path(TOP, "moe"))).parent
    return {str(Path(TOP, path.relative_to(folder))): path
            for path in sorted(folder.rglob("*.*")) if path.suffix in (".yaml", ".json")}


def _near(name: str) -> list[str]:
    known = list(_files())
    ends = [path for path in known if Path(path).stem == Path(name).stem]
    return ends or alike(name, known)


def summary(text: str) -> str:
    """The first sentence of a file's comment, up to a command; of JSON its name."""
    if text.startswith("{"):
        return str(json.loads(text).get("name", ""))
    lines = []
    for line in text.splitlines():
        if not line.startswith("#") or lines and lines[-1].endswith(":"):
            break
        if not line.startswith("# @"):
            lines.append(line.lstrip("# "))
    comment = " ".join(lines)
    sentence = _SENTENCE.match(comment)
    return sentence[1] if sentence else comment.rstrip(":")
