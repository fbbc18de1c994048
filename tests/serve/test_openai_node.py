"""OpenAI's client for JavaScript, from npm, does everything that the one for Python does."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.serve.conftest import CHAT, Service, Stub, jsonl

SCRIPT = Path(__file__).with_name("openai_node.mjs")


@pytest.fixture
def node(tmp_path: Path) -> Path:
    """A folder with the client in it; skips without node, or without its registry."""
    if shutil.which("npm") is None or shutil.which("node") is None:
        pytest.skip("node and npm are not here")
    folder = tmp_path / "node"
    folder.mkdir()
    words = [
        "npm",
        "install",
        "openai@7",
        "--silent",
        "--no-audit",
        "--no-fund",
        "--ignore-scripts",
    ]
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=200)
    if done.returncode:
        pytest.skip(f"npm cannot be reached: {done.stderr[-200:]}")
    shutil.copy(SCRIPT, folder)
    return folder


@pytest.mark.long
def test_openai_node_tunes_pauses_resumes_lists_and_deletes(
    service: Service, stub: Stub, node: Path
) -> None:
    rows = node / "rows.jsonl"
    rows.write_bytes(jsonl(CHAT))
    stub.says("slow")
    done = subprocess.run(
        ["node", SCRIPT.name, f"{service.url}/v1", str(rows), str(stub.what)],
        cwd=node,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.stdout == "all of it\n", done.stderr
