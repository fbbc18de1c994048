"""Faults in jobs/agents."""

from __future__ import annotations

from tests.mutants.fault import Fault

_CLIENT, _TESTS = "jobs/agents/service_client.py", "tests/serve/test_agents.py"

FAULTS = [
    Fault(
        _CLIENT,
        "opener = urllib.request.build_opener(_NoRedirect)",
        "opener = urllib.request.build_opener()",
        why="a redirect takes the token to another address",
        tests=_TESTS,
    ),
    Fault(
        _CLIENT,
        'parts.scheme == "http" and parts.hostname not in _LOOPBACK',
        'parts.scheme == "http" and parts.hostname in ("0.0.0.0",)',
        why="a token crosses a network unencrypted",
        tests=_TESTS,
    ),
    Fault(
        _CLIENT,
        "quote(exp_id, safe='')",
        "exp_id",
        why="an id with a slash or a question mark asks for something else",
        tests=_TESTS,
    ),
    Fault(
        "jobs/agents/mcp_server.py",
        "            raise ToolError(str(error)) from error\n",
        "            raise\n",
        why="an agent reads that a tool failed, and not why",
        tests=_TESTS,
    ),
    Fault(
        "jobs/agents/mcp_server.py",
        'row["state"] in ENDED or is_there',
        "is_there",
        why="an agent waits its whole time for a run that has ended",
        tests=_TESTS,
    ),
]
