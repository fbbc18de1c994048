"""The server with a certificate of its own."""

from __future__ import annotations

import shutil
import socket
import ssl
import subprocess
import sys
import urllib.error
import urllib.request
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from jobs.serve.app import program
from tests.serve.conftest import serving, wait_until
from tests.serve.test_shares import is_closed


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


def get(port: int, certificate: Path, *, path: str = "/healthz") -> int:
    """The status of a request over TLS."""
    trusted = ssl.create_default_context(cafile=str(certificate))
    return httpx.get(f"https://127.0.0.1:{port}{path}", verify=trusted).status_code


def test_handshakes_that_never_end_keep_nobody_out(tmp_path: Path, pair: tuple[Path, Path]) -> None:
    changes: dict[str, Any] = {"idle_connections": 5, "head_s": 30.0}
    with (
        serving(tmp_path / "base", has_keeper=False, certificate=pair, **changes) as running,
        ExitStack() as stack,
    ):
        address = ("127.0.0.1", running.port)
        other = stack.enter_context(
            socket.create_connection(address, source_address=("127.0.0.2", 0))
        )
        silent = [stack.enter_context(socket.create_connection(address)) for _ in range(20)]
        for one in silent[10:]:
            one.sendall(b"\x16\x03\x01\x02\x00\x01\x00")  # a handshake that begins
        wait_until(lambda: sum(map(is_closed, silent)), lambda count: count >= 16, within_s=10)
        assert get(running.port, pair[0]) == 200
        assert len(running.app.idle) <= 5
        assert not is_closed(other)  # the address with the most gives way


def test_a_handshake_that_does_not_end_in_time_is_closed(
    tmp_path: Path, pair: tuple[Path, Path]
) -> None:
    with (
        serving(tmp_path / "base", has_keeper=False, certificate=pair, head_s=0.3) as running,
        ExitStack() as stack,
    ):
        address = ("127.0.0.1", running.port)
        silent, plain, quiet = (
            stack.enter_context(socket.create_connection(address)) for _ in range(3)
        )
        plain.sendall(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
        trusted = ssl.create_default_context(cafile=str(pair[0]))
        quiet = stack.enter_context(trusted.wrap_socket(quiet, server_hostname="127.0.0.1"))
        for one in (silent, plain):
            wait_until(lambda one=one: is_closed(one), bool, within_s=10)
        quiet.settimeout(10)
        with suppress(ssl.SSLError, ConnectionError):  # closed without TLS's own farewell
            assert quiet.recv(1) == b""
        wait_until(lambda: len(running.app.idle), lambda count: count == 0, within_s=10)


def test_a_request_that_comes_with_the_end_of_the_handshake_is_answered(
    tmp_path: Path, pair: tuple[Path, Path]
) -> None:
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    trusted = ssl.create_default_context(cafile=str(pair[0]))
    client = trusted.wrap_bio(incoming, outgoing, server_hostname="127.0.0.1")
    with (
        serving(tmp_path / "base", has_keeper=False, certificate=pair) as running,
        socket.create_connection(("127.0.0.1", running.port), timeout=20) as connection,
    ):
        while True:
            try:
                client.do_handshake()
                break
            except ssl.SSLWantReadError:
                connection.sendall(outgoing.read())
                incoming.write(connection.recv(65536))
        client.write(f"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1:{running.port}\r\n\r\n".encode())
        connection.sendall(outgoing.read())  # the last message and the request in one piece
        answer = b""
        while b"ok\n" not in answer:
            incoming.write(connection.recv(65536))
            with suppress(ssl.SSLWantReadError):
                while True:  # one record at a time
                    answer += client.read()
        assert answer.startswith(b"HTTP/1.1 200")
    assert len(running.app.idle) == 0


def test_files_that_are_no_pair_are_refused(tmp_path: Path, pair: tuple[Path, Path]) -> None:
    cert, key = pair
    for files in ([cert], [cert, cert], [cert, tmp_path / "none"]):
        flags = zip(("--tls_cert", "--tls_key"), map(str, files), strict=False)
        words = [word for pair_ in flags for word in pair_]
        done = CliRunner().invoke(program, ["-sb", str(tmp_path), *words])
        assert (done.exit_code, "--tls_key" in done.output) == (2, True), done.output
    assert key.exists()
