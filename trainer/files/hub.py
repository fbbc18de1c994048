"""Whether the Hugging Face Hub can be reached. A process asks once, and logs once if it cannot."""

from __future__ import annotations

import functools
import logging
import socket
import urllib.request
from urllib.parse import urlsplit

_TIMEOUT_S = 3.0
_PORTS = {"http": 80, "https": 443}

log = logging.getLogger(__name__)


@functools.cache
def may_answer() -> bool:
    """Whether it is worth asking: a proxy may, or the host can be reached."""
    from huggingface_hub.constants import ENDPOINT, is_offline_mode

    if is_offline_mode():
        return False
    if urllib.request.getproxies():
        return True
    parts = urlsplit(ENDPOINT)
    port = parts.port or _PORTS.get(parts.scheme, 443)
    try:
        socket.create_connection((parts.hostname or "", port), timeout=_TIMEOUT_S).close()
    except OSError:
        return False
    return True


def use_cache_where_unreachable() -> None:
    """From here on this process reads Hub ids from their local cache alone, if nobody answers.

    huggingface_hub 1.x tries every file of every model six times, 23 s each, before it looks into
    its cache; with its own offline mode it looks there at once.
    """
    from huggingface_hub import constants

    if may_answer() or constants.HF_HUB_OFFLINE:
        return
    log.warning(
        "%s cannot be reached: models named by a Hub id are read from earlier downloads",
        constants.ENDPOINT,
    )
    constants.HF_HUB_OFFLINE = True
