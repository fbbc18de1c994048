"""How many GPUs a `gres` of Slurm asks for: "gpu:a100:4,nvme:3600" asks for four.

Grammar of one entry: NAME[[:TYPE]:COUNT], where COUNT may end with k, m, g, t or p (powers of
1,024) and NAME may stand behind "gres:" or "gres/"; newer clusters write "=" before the count.
Source: sbatch(1), and the answers of Slurm 22.05.8.
"""

from __future__ import annotations

import re

NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]*\Z")
TYPE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*\Z")
COUNT = re.compile(r"([0-9]+)([kmgtp]?)\Z", re.IGNORECASE)
PREFIX = re.compile(r"gres[:/]")
FORM = 'want NAME[:TYPE][:COUNT], several with a comma between them: "gpu:a100:4,nvme:3600"'


def gpus_of(gres: str) -> int:
    """The GPUs of one node. Only entries named gpu count, each with its type, and they add up.

    ValueError names an entry that cannot be read.
    """
    return sum(count for name, count in map(_entry, gres.split(",")) if name == "gpu")


def _entry(text: str) -> tuple[str, int]:
    """Name and count of one entry; 1 where it states no count."""
    if text.endswith(")") and "(S:" in text:
        at = text.index("(S:")
        raise ValueError(
            f"{text!r}: {text[at:]!r} is how scontrol shows the sockets of a node, and sbatch "
            f"refuses it. Write {text[:at]!r}"
        )
    name, *rest = re.split("[:=]", PREFIX.sub("", text, count=1))
    count = 1
    if rest and COUNT.match(rest[-1]):
        count = _number(rest.pop())
    elif rest and rest[-1][:1].isdigit():
        raise ValueError(f"{text!r}: {rest[-1]!r} is no count; {FORM}")
    if not NAME.match(name) or len(rest) > 1 or not all(map(TYPE.match, rest)):
        raise ValueError(f"{text!r} cannot be read; {FORM}")
    return name, count


def _number(text: str) -> int:
    match = COUNT.match(text)
    assert match is not None, "the caller has looked"
    return int(match[1]) * 1024 ** " kmgtp".index(match[2].lower() or " ")
