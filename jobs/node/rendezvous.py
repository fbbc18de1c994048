"""Where the nodes of one job meet: host, port and id of torchrun's rendezvous. Standard library.

A launch line holds three placeholders, which the node fills in: HEAD_NODE, RDZV_PORT and RDZV_ID.
Port and id come from the job's token, which no other attempt has, so that two jobs with one first
node are two worlds. The launch line itself stays the same for every attempt at an experiment.
"""

from __future__ import annotations

import hashlib
import logging
import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jobs.node import host as node
from trainer.errors import LatheError

HEAD, PORT, ID = "HEAD_NODE", "RDZV_PORT", "RDZV_ID"
FIRST_PORT, PORTS = 29400, 2000  # below the ports that Linux gives out by itself (32768 and above)
TRIES = 50

log = logging.getLogger(__name__)


def fill_in(words: Sequence[str], spec: Mapping[str, Any]) -> list[str]:
    """The words of a launcher with host, port and id of this job in place of the placeholders.

    LatheError when the first node has no free port to offer.
    """
    head = os.environ.get("LATHE_HEAD_NODE") or socket.gethostname()
    words = [word.replace(HEAD, head) for word in words]
    if any(PORT in word for word in words):
        port = str(_port(spec["token"]))
        words = [word.replace(PORT, port) for word in words]
    if any(ID in word for word in words):
        # a scheduler that starts the job again must not let it meet what is left of the last start
        name = f"{spec['token']}_{node.restarts()}"
        words = [word.replace(ID, name) for word in words]
    return words


def _port(token: str) -> int:
    """The port at which this job meets.

    Under Slurm the first node alone starts a launcher on every node, so it may take another port
    than the token's: all of them are told. Where every node has a wrapper of its own (Kubernetes),
    each must know the port by itself: a port that is taken is an error there.
    """
    ports = candidates(token)
    first = next(ports)
    if not node.is_leader() or is_free(first):
        return first
    clash = f"port {first} of {socket.gethostname()}, where the nodes of this job meet, is taken"
    if "LATHE_NODE_RANK" in os.environ:
        raise LatheError(f"{clash}. `retry` sends it with another port.")
    for port in ports:
        if is_free(port):
            log.warning("%s: the nodes of this job meet at port %d", clash, port)
            return port
    raise LatheError(f"{clash}, and so are {TRIES - 1} others. `retry` sends it with other ports.")


def candidates(token: str) -> Iterator[int]:
    """The port of a token, then others, each time in the same order."""
    for number in range(TRIES):
        digest = hashlib.sha256(f"{token} {number}".encode()).hexdigest()
        yield FIRST_PORT + int(digest[:8], 16) % PORTS


def is_free(port: int) -> bool:
    """Whether nobody on this host listens at `port`, on any address."""
    has_both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if has_both else socket.AF_INET
    try:
        socket.create_server(("", port), family=family, dualstack_ipv6=has_both).close()
    except OSError:
        return False
    return True
