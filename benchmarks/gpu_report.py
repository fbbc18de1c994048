"""The tables of docs/log.md, and pictures, from what `benchmarks/gpu.py` wrote.

python benchmarks/gpu_report.py [--out gpu_results] [--pictures FOLDER]
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from log_tables import table

Results = dict[str, dict[str, Any]]
_EQUAL = ("repeats", "resumes")


def read(folder: Path) -> Results:
    """The results of all parts by their names."""
    files = sorted(folder.glob("*.json"))
    return {file.stem: json.loads(file.read_text()) for file in files}


def _of(results: Results, prefix: str) -> Results:
    """The parts whose names begin so, without that."""
    named = {name.removeprefix(prefix): x for name, x in results.items() if name.startswith(prefix)}
    return {name: found for name, found in named.items() if "failed" not in found}


def steps(results: Results) -> str:
    rows = []
    for name, found in _of(results, "step-").items():
        rate = next((f"{v:,.0f} {k}" for k, v in found.items() if k.endswith("_per_s")), "")
        planned = sum(found["plan"].values()) / 2**30 if found["plan"] else None
        rows.append(
            [
                name,
                f"{1000 * found['step_s']:.0f}",
                rate.replace("_per_s", "/s"),
                f"{found['mfu']:.1%}" if "mfu" in found else "-",
                f"{found['peak_gib']:.1f}",
                "-" if planned is None else f"{planned:.1f}",
                f"{found['seconds_in_all']:.0f}",
            ]
        )
    heads = ["shape", "ms a step", "rate", "MFU", "peak GiB", "planned", "s with start"]
    return table(heads, rows)


def profiles(results: Results) -> str:
    kinds = ("matmul", "attention", "memory-bound", "copies", "communication")
    rows = []
    for name, found in _of(results, "profile-").items():
        shares = [f"{found['shares'][kind]:.0%}" for kind in kinds]
        gaps = f"{found['gaps_s'] / found['wall_s']:.0%}"
        waits = str(sum(found["waits"].values()))
        rows.append([name, f"{1000 * found['wall_s']:.0f}", *shares, gaps, waits])
    return table(["step of", "ms", *kinds, "gaps", "waits"], rows)


def kernels(results: Results) -> str:
    found = results.get("attention", {}).get("attention", {})
    lengths = sorted({int(name.rpartition("-")[2]) for name in found})
    ways = list(dict.fromkeys(name.rpartition("-")[0] for name in found))

    def cell(way: str, length: int) -> str:
        one = found[f"{way}-{length}"]
        if "failed" in one:
            return f"failed: {one['failed'][:60]}"
        return f"{1000 * one['s']:.1f} ms, {one['peak_gib']:.1f} GiB"

    rows = [[str(n), *(cell(way, n) for way in ways)] for n in lengths]
    return table(["tokens a row", *ways], rows)


def _yes(is_equal: bool) -> str:
    return "yes" if is_equal else "**no**"


def bits(results: Results) -> str:
    rows = []
    for name, found in _of(results, "resume-").items():
        plain, fixed = found["as it is"], found.get("deterministic")
        says = [_yes(one[key]) if one else "-" for one in (plain, fixed) for key in _EQUAL]
        times = f"{fixed['seconds'] / plain['seconds']:.2f}" if fixed else "-"
        rows.append([name, *says, times])
    heads = ["task", "repeats", "resumes", "repeats, deterministic", "resumes", "time"]
    return table(heads, rows)


def others(results: Results) -> str:
    """Versions, rates of the device, and parts that failed."""
    lines = []
    for name in ("environment", "calibration", "new_shapes", "head", "tests"):
        if name in results:
            lines.append(f"{name}: {json.dumps(results[name])}")
    for name, found in results.items():
        if "failed" in found:
            lines.append(f"{name}: FAILED, {found['failed'].splitlines()[-1][:200]}")
    return "\n\n".join(lines)


def picture(results: Results, folder: Path) -> None:
    """Where the time of a step goes, a bar for each task."""
    from matplotlib import pyplot

    folder.mkdir(parents=True, exist_ok=True)
    found = _of(results, "profile-")
    figure, axes = pyplot.subplots(figsize=(9, 4))
    left = [0.0] * len(found)
    kinds = [*next(iter(found.values()))["shares"], "gaps"] if found else []
    for kind in kinds:
        widths = [
            (one["gaps_s"] if kind == "gaps" else one["shares"][kind] * one["busy_s"])
            / one["wall_s"]
            for one in found.values()
        ]
        axes.barh(list(found), widths, left=left, label=kind)
        left = [start + width for start, width in zip(left, widths, strict=True)]
    axes.legend(fontsize=8)
    axes.set_xlabel("share of a step")
    figure.tight_layout()
    figure.savefig(folder / "profile.svg")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("gpu_results"))
    parser.add_argument("--pictures", type=Path)
    given = parser.parse_args()
    results = read(given.out)
    if not results:
        parser.error(f"{given.out}: no results. Run benchmarks/gpu.py first.")
    for part in (steps, profiles, kernels, bits, others):
        print(part(results), end="\n\n")
    if given.pictures is not None:
        picture(results, given.pictures)


if __name__ == "__main__":
    main()
