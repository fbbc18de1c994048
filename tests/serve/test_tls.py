"""The server with a certificate of its own."""

from __future__ import annotations

import shutil
import socket
import ssl
import subprocess
import sys
import urllib.error
import urllib.request
from contextlib import suppress
from pathlib import Path

import pytest
from typer.testing import CliRunner

from jobs.serve.app import program
from tests.serve.conftest import wait_until


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    """A certificate for the loopback, and its key."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not here")
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    words = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"]
    words += [
        "-nodes",
        "-days",
        "2",
        "-subj",
        "/CN=localhost",
        "-addext",
        "subjectAltName=IP:127.0.0.1",
    ]
    subprocess.run([*words, "-keyout", key, "-out", cert], check=True, capture_output=True)
    return cert, key


def test_tls_by_files_serves_https_alone(tmp_path: Path, pair: tuple[Path, Path]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    words = ["-m", "jobs.serve.app", "-sb", str(tmp_path / "base"), "--port", str(port)]
    files = ["--tls_cert", str(pair[0]), "--tls_key", str(pair[1])]
    (tmp_path / "base").mkdir()
    process = subprocess.Popen([sys.executable, *words, *files])
    try:
        trusted = ssl.create_default_context(cafile=str(pair[0]))

        def look() -> bytes:
            with suppress(urllib.error.URLError):
                url = f"https://127.0.0.1:{port}/healthz"
                with urllib.request.urlopen(url, context=trusted, timeout=30) as answer:
                    return answer.read()
            return b""

        wait_until(look, lambda content: content == b"ok\n")
        with pytest.raises((urllib.error.URLError, ConnectionError)):
            urllib.request.urlopen(f"http://127.0.0.1:{port}/healthz", timeout=30)
        with pytest.raises(urllib.error.URLError, match="CERTIFICATE_VERIFY_FAILED"):
            urllib.request.urlopen(f"https://127.0.0.1:{port}/healthz", timeout=30)
    finally:
        process.terminate()
        assert process.wait() in (0, -15)


def test_files_that_are_no_pair_are_refused(tmp_path: Path, pair: tuple[Path, Path]) -> None:
    cert, key = pair
    for files in ([cert], [cert, cert], [cert, tmp_path / "none"]):
        flags = zip(("--tls_cert", "--tls_key"), map(str, files), strict=False)
        words = [word for pair_ in flags for word in pair_]
        done = CliRunner().invoke(program, ["-sb", str(tmp_path), *words])
        assert (done.exit_code, "--tls_key" in done.output) == (2, True), done.output
    assert key.exists()
