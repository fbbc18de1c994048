"""Runs experiments in this process, one after the other and with this terminal, to debug them. The
submission returns when they have ended.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from jobs.node import wrapper
from jobs.protocol import Finding, JobSpec, Rendered, Traits
from trainer.errors import ConfigError

if TYPE_CHECKING:
    from jobs.job_state import Observed


class Inline:
    """Calls the wrapper as a function, so that breakpoints of the training have the terminal."""

    name: ClassVar[str] = "inline"
    traits: ClassVar[Traits] = Traits(
        is_in_process=True, runs_here=True, shares_disk=True, keeps_queue=True
    )
    validation: ClassVar[str] = "run for real by the tests"

    def check(self) -> list[Finding]:
        """One good finding: this backend needs nothing."""
        return [
            Finding("inline", True, "runs here, one after the other; a debugger has the terminal")
        ]

    def render(self, spec: JobSpec) -> Rendered:
        """Which attempt to run."""
        if spec.job.nodes > 1 or spec.after:
            raise ConfigError(
                "inline: one machine, one experiment after the other. Leave nodes and --after out."
            )
        return Rendered(
            spec.token,
            "rendered.inline.json",
            json.dumps({"folder": spec.folder, "attempt": spec.attempt}) + "\n",
        )

    def rehearse(self, rendered: Rendered) -> str | None:
        """None: there is no scheduler to ask."""
        return None

    def submit(self, rendered: Rendered) -> str:
        """Run the attempt to its end. Its exit file says how it ended."""
        job = json.loads(rendered.text)
        job_id = f"{socket.gethostname()}:{os.getpid()}"
        wrapper.run(Path(job["folder"]), job["attempt"], has_terminal=True)
        return job_id

    def find(self, token: str) -> list[str]:
        """No ids: this backend keeps no list of jobs. Exit file and heartbeat tell enough."""
        return []

    def query(self, ids: Sequence[str]) -> dict[str, Observed]:
        """Nothing: this backend keeps no list of jobs."""
        return {}

    def cancel(self, job_id: str) -> None:
        """Does nothing: the person who runs it stops it with Ctrl-C."""

    def logs(self, job_id: str, *, follow: bool) -> Iterator[str]:
        """No lines: the output went to the terminal."""
        return iter(())
