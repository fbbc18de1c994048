"""The pictures of the front page: the live page of a training run, in light and dark.

    python benchmarks/picture.py [--out docs/pictures]

Trains a language model of a million parameters for a minute, serves its run folder as
`lathe-jobs serve` does, and takes two screenshots while it trains, with a headless Chromium
(Debian: chromium chromium-driver). The name of this machine is left out.
"""

from __future__ import annotations

import argparse
import base64
import io
import json
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # runs from a checkout

from exp_configs import CAUSAL_LM_TINY, vary
from tests.serve.browser import Browser, browsing, missing
from tests.serve.conftest import serving, wait_until
from trainer.config.identity import exp_id

ROOT = Path(__file__).resolve().parent.parent
RUN = vary(
    CAUSAL_LM_TINY,
    train={"steps": 240, "log_every": 2, "eval_every": 12, "save_every": 60},
    schedule={"warmup_steps": 20},
)
SHOT_AT = 180  # of the steps: the curves have a shape, and the run is still alive
SIZE = {"width": 1200, "height": 764, "deviceScaleFactor": 1.5, "mobile": False}
# The picture ends below the second row of curves.
LAST = "document.querySelectorAll('.chartbox')[5].getBoundingClientRect()"
END = f"{LAST}.bottom + window.scrollY + 14"
POINTS = "document.querySelector('.chartbox polyline')?.points.length"  # of the first curve
LEAVE_OUT = """
for (const one of document.querySelectorAll('.facts span'))
    if (one.innerText === args[0]) one.remove();
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "pictures")
    out: Path = parser.parse_args().out
    reason = missing()
    if reason is not None:
        sys.exit(reason)
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as name:
        take(Path(name), out.resolve())


def take(folder: Path, out: Path) -> None:
    """Train in a folder, and write live_light.png and live_dark.png."""
    (folder / "group.py").write_text(f"EXP_GROUPS = {{'docstrings': [{RUN!r}]}}\n")
    command = [sys.executable, str(ROOT / "trainval.py"), "--exp_configs", "group.py"]
    command += ["-e", "docstrings", "-sb", "results"]
    training = subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL)
    status = folder / "results" / exp_id(RUN) / "status.json"
    try:
        with serving(folder / "results") as service, browsing(folder) as browser:
            wait_until(lambda: step_of(status), lambda step: step >= SHOT_AT, within_s=1200)
            browser.cdp("Emulation.setDeviceMetricsOverride", SIZE)
            browser.cdp("Emulation.setScrollbarsHidden", {"hidden": True})
            browser.open(f"{service.url}/live#/run/{exp_id(RUN)}")
            browser.until(f"return {POINTS} > {SHOT_AT} / 4")
            height = round(browser.run(f"return {END}"))
            browser.cdp("Emulation.setDeviceMetricsOverride", {**SIZE, "height": height})
            for scheme in ("light", "dark"):
                browser.prefer(scheme)
                shoot(browser, out / f"live_{scheme}.png")
    finally:
        training.terminate()
        training.wait()


def step_of(status: Path) -> int:
    """The step that a run has reached; 0 before its folder is there."""
    return json.loads(status.read_text())["step"] if status.exists() else 0


def shoot(browser: Browser, path: Path) -> None:
    """A picture of the part of the page that is in sight."""
    browser.run(
        "await new Promise(done => setTimeout(done, 500))"
    )  # until its colours have changed
    browser.run(LEAVE_OUT, socket.gethostname())
    content = base64.b64decode(browser.cdp("Page.captureScreenshot", {})["data"])
    # A page of few colours loses nothing in sight by a palette, and is half as large.
    Image.open(io.BytesIO(content)).convert("RGB").quantize(256).save(path, optimize=True)


if __name__ == "__main__":
    main()
