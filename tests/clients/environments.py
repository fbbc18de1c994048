"""Where the clients live: their pins conflict, so each environment is a folder of its own, made once
and kept in LATHE_CLIENTS (else ~/.cache/lathe-clients). None has torch, and none is ours.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HOME = Path(os.environ.get("LATHE_CLIENTS", Path.home() / ".cache" / "lathe-clients"))
PYTHON = {
    "openai-1": ["openai==1.40.*", "httpx<0.28"],
    "openai-2": [
        "openai==2.54.*",
        "llama-index-llms-openai-like==0.8.*",
        "llama-index-embeddings-openai-like==0.4.*",
        "litellm==1.110.*",
        "dspy==3.4.*",
        "instructor==1.17.*",
    ],
    "tinker": ["tinker==0.38.0"],  # wants Python 3.11
    "openai-3": ["openai==3.54.*", "langchain-openai==1.7.*", "wandb==0.31.*", "pandas"],
}
NODE = {"node": ["openai@7"]}
_PIP = ["install", "--quiet", "--disable-pip-version-check"]
_NPM = ["npm", "install", "--silent", "--no-audit", "--no-fund", "--ignore-scripts"]


def environment(name: str) -> Path:
    """The folder of an environment, which is made if it is not there. Skips the test where a
    registry cannot be reached.
    """
    packages = {**PYTHON, **NODE}[name]
    digest = hashlib.sha256(repr((packages, sys.version_info[:2])).encode()).hexdigest()[:12]
    folder = HOME / f"{name}-{digest}"
    if not (folder / "whole").is_file():
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        if name in NODE:
            _run([*_NPM, *packages], folder)
        else:
            _run([sys.executable, "-m", "venv", str(folder)], folder)
            _run([str(folder / "bin" / "python"), "-m", "pip", *_PIP, *packages], folder)
        (folder / "whole").touch()
    return folder


def _run(words: list[str], folder: Path) -> None:
    if shutil.which(words[0]) is None:
        pytest.skip(f"{words[0]} is not here")
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=1500)
    if done.returncode:
        pytest.skip(f"{' '.join(words)}: {done.stderr[-300:]}")
