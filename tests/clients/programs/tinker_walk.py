"""Calls every public method of the clients of the Tinker SDK, each async twin too, against a server,
and prints how each ended.

usage: tinker_walk.py JSON with "url", "model", and "torch": a folder of packages with torch, which
the losses of a client of its own need
"""

from __future__ import annotations

import asyncio
import datetime
import inspect
import json
import os
import sys
import warnings
from collections.abc import Callable
from typing import Any

WORLD = json.loads(sys.argv[1])
os.environ |= {"TINKER_BASE_URL": WORLD["url"], "TINKER_API_KEY": "tml-none"}
os.environ["TINKER_PROJECT_ID"] = "default"
sys.path.append(WORLD["torch"])  # behind the SDK's own packages
warnings.simplefilter("ignore")

import tinker  # noqa: E402
from tinker import types  # noqa: E402
from tinker.lib.public_interfaces.admin_client import AdminClient  # noqa: E402
from tinker.lib.public_interfaces.rest_client import RestClient  # noqa: E402
from tinker.lib.public_interfaces.sampling_client import SamplingClient  # noqa: E402
from tinker.lib.public_interfaces.service_client import ServiceClient  # noqa: E402
from tinker.lib.public_interfaces.training_client import TrainingClient  # noqa: E402

MODEL = WORLD["model"]
CLASSES = (ServiceClient, TrainingClient, SamplingClient, RestClient, AdminClient)
PROMPT = types.ModelInput.from_ints([5, 6, 7, 8])
PARAMS = types.SamplingParams(max_tokens=4, seed=1)
ADAM = types.AdamParams(learning_rate=1e-3)
# Part of what the SDK says when the server refuses, or refuses itself because of what it was told.
REFUSALS = ("Not offered", "whoami requires JWT auth")


def datum(tokens: tuple[int, ...] = (1, 2, 3, 4)) -> types.Datum:
    inputs = {"target_tokens": [*tokens[1:], 9], "weights": [1.0] * len(tokens)}
    return types.Datum(model_input=types.ModelInput.from_ints([*tokens]), loss_fn_inputs=inputs)


def own_loss(data: list[Any], logprobs: list[Any]) -> tuple[Any, dict[str, float]]:
    loss = -sum(one.sum() for one in logprobs)
    return loss, {"own": float(loss)}


def make_traced() -> Callable[..., Any]:
    """Another function at every call: the SDK takes each loss once in a session."""
    scope: dict[str, Any] = {}
    make_traced.number += 1  # type: ignore[attr-defined]
    name = f"loss_{make_traced.number}"  # type: ignore[attr-defined]
    exec(f"def {name}(logprobs, weights):\n    return -(logprobs * weights).sum(), {{}}\n", scope)
    return scope[name]


make_traced.number = 0  # type: ignore[attr-defined]


class World:
    """What the calls work on; made once."""

    def __init__(self) -> None:
        self.service = ServiceClient(display_name="walk", user_metadata={"team": "walk"})
        self.training = self.service.create_lora_training_client(MODEL, rank=4, seed=1).result()
        self.number = 0
        self.training.forward_backward([datum()], "cross_entropy").result()
        self.training.optim_step(ADAM).result()
        self.state = self.training.save_state("first").result().path
        self.sampler = self.training.save_weights_for_sampler("first").result().path
        self.external = self.training.save_weights_external("first").result().path
        self.sampling = self.service.create_sampling_client(model_path=self.sampler).result()
        self.rest, self.admin = RestClient(), AdminClient()
        self.session = self.training.model_id.partition(":")[0]

    def name(self) -> str:
        self.number += 1
        return f"walk-{self.number}"

    def saved(self) -> str:
        """The path of a state that may be deleted."""
        return self.training.save_state(self.name()).result().path

    def step(self, **how: Any) -> Any:
        self.training.forward_backward([datum()], "cross_entropy").result()
        return how


Args = tuple[tuple[Any, ...], dict[str, Any]]


def args(*values: Any, **named: Any) -> Args:
    return values, named


def calls(world: World) -> dict[str, Callable[[], Args]]:
    """By method: what it is called with. Those that are not here take nothing."""
    state, sampler, run = world.state, world.sampler, world.training.model_id
    rows = [datum()]
    days = ("2026-11-01T00:00:00Z", "2026-11-02T00:00:00Z")
    weights = {"logprobs": 1, "weights": 1}
    parts = types.ParsedCheckpointTinkerPath.from_tinker_path

    def deleted() -> Args:
        path = parts(world.saved())
        return args(path.training_run_id, path.checkpoint_id)

    table: dict[str, Callable[[], Args]] = {
        "ServiceClient.copy_weights": lambda: args(state),
        "ServiceClient.create_custom_loss": lambda: args(make_traced(), weights),
        "ServiceClient.create_lora_training_client": lambda: args(MODEL, rank=2),
        "ServiceClient.create_sampling_client": lambda: args(model_path=sampler),
        "ServiceClient.create_training_client_from_state": lambda: args(state),
        "ServiceClient.create_training_client_from_state_with_optimizer": lambda: args(state),
        "TrainingClient.create_sampling_client": lambda: args(sampler),
        "TrainingClient.forward": lambda: args(rows, "cross_entropy"),
        "TrainingClient.forward_backward": lambda: args(rows, "cross_entropy"),
        "TrainingClient.forward_backward_custom": lambda: args(rows, own_loss),
        "TrainingClient.load_state": lambda: args(state),
        "TrainingClient.load_state_with_optimizer": lambda: args(state),
        "TrainingClient.optim_step": lambda: args(ADAM, **world.step()),
        "TrainingClient.save_state": lambda: args(world.name()),
        "TrainingClient.save_weights_external": lambda: args(world.name()),
        "TrainingClient.save_weights_for_sampler": lambda: args(world.name()),
        "SamplingClient.compute_logprobs": lambda: args(PROMPT),
        "SamplingClient.create": lambda: args(world.service.holder, base_model=MODEL),
        "SamplingClient.from_sampler_handle": lambda: args(world.sampling.get_sampler_handle()),
        "SamplingClient.on_queue_state_change": lambda: args(
            tinker.lib.api_future_impl.QueueState.ACTIVE, None
        ),
        "SamplingClient.sample": lambda: args(PROMPT, 2, PARAMS),
        "RestClient.assign_session_project": lambda: args(world.session, "other"),
        "RestClient.copy_weights": lambda: args(state, "default"),
        "RestClient.delete_checkpoint": deleted,
        "RestClient.delete_checkpoint_from_tinker_path": lambda: args(world.saved()),
        "RestClient.export_session_trace": lambda: args(world.session),
        "RestClient.get_external_weights_urls": lambda: args(world.external),
        "RestClient.get_sampler": lambda: args(world.sampling._sampling_session_id),
        "RestClient.get_session": lambda: args(world.session),
        "RestClient.get_training_run": lambda: args(run),
        "RestClient.get_training_run_by_tinker_path": lambda: args(state),
        "RestClient.get_weights_info_by_tinker_path": lambda: args(state),
        "RestClient.list_checkpoints": lambda: args(run),
        "RestClient.publish_checkpoint_from_tinker_path": lambda: args(state),
        "RestClient.search_sessions": lambda: args(types.SessionSearchRequest(display_name="walk")),
        "RestClient.set_checkpoint_ttl_from_tinker_path": lambda: args(sampler, 7200),
        "RestClient.unpublish_checkpoint_from_tinker_path": lambda: args(state),
    }
    for client in ("RestClient", "AdminClient"):
        table[f"{client}.get_billing_usage"] = lambda: args(*days)
        table[f"{client}.get_audit_log"] = lambda: args("all", datetime.date(2026, 11, 1))
    return table


def instance(world: World, kind: type) -> Any:
    clients = (world.service, world.training, world.sampling, world.rest, world.admin)
    return next(one for one in clients if isinstance(one, kind))


async def whole(value: Any) -> Any:
    """What a call gives in the end: futures of futures are awaited."""
    for _ in range(3):
        if inspect.isawaitable(value):
            value = await value
        elif hasattr(value, "result") and not inspect.isclass(value):
            value = await asyncio.to_thread(value.result)
    return value


async def ends(world: World, kind: type, name: str, table: dict[str, Any]) -> str:
    """How a call ended: "works", "refused: why" or "fails: why"."""
    plain = name.removesuffix("_async")
    own = ServiceClient() if (kind, plain) == (ServiceClient, "close") else None
    if own is not None:  # it ends its session: one of its own
        await asyncio.to_thread(lambda: own.holder)
    values = await asyncio.to_thread(table.get(f"{kind.__name__}.{plain}", lambda: args()))
    if own is not None:
        values = args("success")
    try:
        target = getattr(own or instance(world, kind), name)
        if not callable(target):
            return "works"
        if inspect.iscoroutinefunction(target):
            await whole(target(*values[0], **values[1]))
        else:
            await whole(await asyncio.to_thread(target, *values[0], **values[1]))
    except Exception as error:
        cause = error.__cause__
        text = f"{type(error).__name__}: {error}" + (f" ({cause})" if cause else "")
        is_refused = any(words in text for words in REFUSALS)
        return f"{'refused' if is_refused else 'fails'}: {text}"
    return "works"


def methods(kind: type) -> list[str]:
    """The public methods and properties of a client."""
    members = inspect.getmembers(kind)
    is_one = (inspect.isfunction, inspect.ismethod, lambda one: isinstance(one, property))
    names = [name for name, one in members if any(check(one) for check in is_one)]
    return [name for name in names if not name.startswith("_")]


async def main() -> None:
    world = await asyncio.to_thread(World)
    table = calls(world)
    for kind in CLASSES:
        for name in methods(kind):
            try:
                result = await asyncio.wait_for(ends(world, kind, name, table), 300)
            except asyncio.TimeoutError:
                result = "fails: it did not end within 300 s"
            print(json.dumps({"call": f"{kind.__name__}.{name}", "result": result}), flush=True)
    await asyncio.to_thread(lambda: world.service.close("success").result())


if __name__ == "__main__":
    asyncio.run(main())
    sys.stdout.flush()
    os._exit(0)  # the SDK's threads and heartbeats are no part of the walk
