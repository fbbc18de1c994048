"""The tools that `lathe mcp` offers to an agent: the Model Context Protocol on stdin and stdout.

Each tool is one or more requests to a service, with the token of LATHE_TOKEN: an agent can do what
that token may do, and nothing else. The service checks it, not this program.
"""

from __future__ import annotations

import time
from typing import Annotated, Any, Literal

import anyio.to_thread
from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from mcp_types import ToolAnnotations
from pydantic import Field

from jobs.agents.service_client import ServiceClient, of_run
from jobs.job_state import ENDED
from trainer.errors import LatheError
from trainer.version import lathe_version

INSTRUCTIONS = """Lathe fine-tunes models. An experiment is one dictionary, its id a digest of it.
Read before you act: list_runs, show_run, read_metrics, read_results. Before submit_experiment,
call plan_experiment (is it new, what would run) and dry_run_experiment (every check, the memory
plan, no training). The same dictionary is never trained twice: submitting it again resumes it."""
_POLL_S, _MOST_S = 2.0, 600.0

ExpId = Annotated[str, Field(description="The id of an experiment: 32 hexadecimal digits.")]
Group = Annotated[str | None, Field(description="The name of a group; all groups without it.")]
Experiment = Annotated[
    dict[str, Any] | None, Field(description="The dictionary of the experiment (docs/keys.md).")
]
Steps = Annotated[int | None, Field(description="Steps instead of those it says.", ge=1)]
DataPath = Annotated[str | None, Field(description="The folder of its data, on the server.")]


class AgentClient(ServiceClient):
    """A service whose refusals reach the agent as the sentences that they are."""

    def ask(self, method: str, path: str, body: bytes | None) -> Any:
        """As of ServiceClient; ToolError for each of its errors."""
        try:
            return super().ask(method, path, body)
        except LatheError as error:
            raise ToolError(str(error)) from error


class Tools:
    """One method for each tool; its docstring is what an agent reads of it."""

    def __init__(self, service: ServiceClient) -> None:
        self._service = service

    def list_runs(
        self,
        group: Group = None,
        state: Annotated[str | None, Field(description="Such as running or failed.")] = None,
        limit: Annotated[int, Field(ge=1, le=500)] = 50,
    ) -> dict[str, Any]:
        """List the newest runs: id, group, state, reason, step, times."""
        path = "/lathe/v1/status"
        rows = self._service.get(path, group=group, state=state, limit=limit + 1)
        return {"runs": rows[:limit], "has_more": len(rows) > limit}

    def show_run(self, exp_id: ExpId) -> dict[str, Any]:
        """Show a run: its state and why, its attempts, its dictionary."""
        return self._service.get(of_run(exp_id))

    def read_metrics(
        self,
        exp_id: ExpId,
        since: Annotated[int, Field(description="Lines after this step.", ge=0)] = 0,
    ) -> dict[str, Any]:
        """Read the numbers of a run, a line for each logged step; `has_more` says to ask again with
        `since` set to the last step.
        """
        return self._service.get(of_run(exp_id, "metrics"), since=since)

    def read_logs(
        self,
        exp_id: ExpId,
        limit: Annotated[int, Field(description="The last so many lines.", ge=1, le=1000)] = 100,
        attempt: Annotated[int | None, Field(description="The last attempt without it.")] = None,
        errors: Annotated[bool, Field(description="What it printed to stderr.")] = False,
    ) -> dict[str, Any]:
        """Read the last lines that an attempt of a run printed."""
        return self._service.get(
            of_run(exp_id, "logs"), limit=limit, attempt=attempt, err="1" if errors else None
        )

    def read_results(self, group: Group = None) -> Any:
        """Read the best scores of runs, and what distinguishes their dictionaries."""
        return self._service.get("/lathe/v1/results", group=group)

    def plan_experiment(
        self,
        experiment: Experiment = None,
        group: Group = None,
        steps: Steps = None,
        data_path: DataPath = None,
    ) -> Any:
        """Say what a submission would do: new, running, finished, refused. Sends nothing."""
        return self._experiments("plan", experiment, group, steps, data_path)

    def dry_run_experiment(
        self,
        experiment: Experiment = None,
        group: Group = None,
        steps: Steps = None,
        data_path: DataPath = None,
    ) -> Any:
        """Check everything of an experiment but the training: keys, base, rows, memory. It takes up
        to ten minutes. `code` 0 means that it would train.
        """
        return self._experiments("dry_run", experiment, group, steps, data_path)

    def submit_experiment(
        self,
        experiment: Experiment = None,
        group: Group = None,
        steps: Steps = None,
        data_path: DataPath = None,
    ) -> Any:
        """Submit an experiment, or all of a group, to the service's backend. It uses GPUs. An
        experiment that is running or finished is not sent again.
        """
        return self._experiments("submit", experiment, group, steps, data_path)

    async def wait_for_run(
        self,
        exp_id: ExpId,
        seconds: Annotated[float, Field(ge=1, le=_MOST_S)] = 60,
        step: Annotated[int | None, Field(description="Return at this step, too.")] = None,
    ) -> dict[str, Any]:
        """Wait until a run has ended or has reached a step, `seconds` at most; returns the run."""
        until = time.monotonic() + seconds
        while True:
            row = await anyio.to_thread.run_sync(self.show_run, exp_id)
            is_there = step is not None and (row.get("step") or 0) >= step
            if row["state"] in ENDED or is_there or time.monotonic() >= until:
                return row
            await anyio.sleep(_POLL_S)

    def cancel_run(self, exp_id: ExpId) -> Any:
        """Cancel a live run. It saves a checkpoint first, so that retry_run goes on from there."""
        return self._service.post(of_run(exp_id, "cancel"))

    def retry_run(self, exp_id: ExpId) -> Any:
        """Run an ended experiment again from its last checkpoint, with the same flags and code."""
        return self._service.post(of_run(exp_id, "retry"))

    def check_backend(self) -> Any:
        """Say whether the backend (a cluster, or local processes) can be used, and why not."""
        return self._service.get("/lathe/v1/doctor")

    def _experiments(
        self,
        action: Literal["plan", "dry_run", "submit"],
        experiment: dict[str, Any] | None,
        group: str | None,
        steps: int | None,
        data_path: str | None,
    ) -> Any:
        fields = {
            "experiment": experiment,
            "group": group,
            "steps": steps,
            "data_path": data_path,
        }
        body = {name: value for name, value in fields.items() if value is not None}
        return self._service.post("/lathe/v1/experiments", {**body, "action": action})


READ = ToolAnnotations(read_only_hint=True, open_world_hint=False)
SEND = ToolAnnotations(
    read_only_hint=False, destructive_hint=False, idempotent_hint=True, open_world_hint=False
)
END = ToolAnnotations(read_only_hint=False, destructive_hint=True, open_world_hint=False)
KINDS: dict[str, ToolAnnotations] = {
    **dict.fromkeys(("list_runs", "show_run", "read_metrics", "read_logs", "read_results"), READ),
    **dict.fromkeys(("plan_experiment", "dry_run_experiment"), READ),
    **dict.fromkeys(("wait_for_run", "check_backend"), READ),
    **dict.fromkeys(("submit_experiment", "retry_run"), SEND),
    "cancel_run": END,
}


def make_server(url: str, token: str | None) -> MCPServer:
    """The server with all tools, over one service. ConfigError as of ServiceClient."""
    tools = Tools(AgentClient(url, token))
    server = MCPServer(
        "lathe", instructions=INSTRUCTIONS, version=lathe_version(), log_level="WARNING"
    )
    for name, kind in KINDS.items():
        server.add_tool(getattr(tools, name), name=name, annotations=kind)
    return server
