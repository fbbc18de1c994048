"""Requests of the Tinker dialect as its SDK sends them, without the SDK, which the tests' own
environment does not have.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import httpx
import numpy as np

from jobs.serve.steps import wire
from tests.serve.conftest import Service

Row = tuple[Sequence[int], dict[str, Any]]
ROWS: list[Row] = [([1, 2, 3], {"target_tokens": [2, 3, 4], "weights": [0.0, 1.0, 1.0]})] * 2


def message_of(
    model: str, seq: int, rows: Sequence[Row], *, loss: str = "cross_entropy", forward: bool = False
) -> bytes:
    """The protobuf of a ForwardBackwardRequest."""
    message = wire.ForwardBackwardRequest(model_id=model, seq_id=seq, loss_fn=loss)
    message.forward_only = forward
    for tokens, inputs in rows:
        datum = message.data.add()
        datum.model_input.add().encoded_text.tokens = np.asarray(tokens, "<i4").tobytes()
        for name, values in inputs.items():
            array = np.asarray(values)
            is_int = np.issubdtype(array.dtype, np.integer)
            tensor = datum.loss_fn_inputs[name]
            tensor.dtype = wire.INT64 if is_int else wire.FLOAT32
            tensor.dense = array.astype("<i8" if is_int else "<f4").tobytes()
            tensor.shape.extend(array.shape)
    return message.SerializeToString()


@dataclass
class Driver:
    """A client of the dialect."""

    http: httpx.Client

    def post(self, path: str, body: dict[str, Any], **headers: str) -> httpx.Response:
        return self.http.post(f"/api/v1/{path}", json=body, headers=headers)

    def get(self, path: str) -> httpx.Response:
        return self.http.get(f"/api/v1/{path}")

    def session(self) -> str:
        body = {"tags": [], "user_metadata": {"team": "x"}, "sdk_version": "0.38.0"}
        answer = self.post("create_session", {**body, "display_name": "first loop"})
        return answer.json()["session_id"]

    def run(self, session: str, number: int = 0, **changes: Any) -> str:
        """A new training run, as soon as its worker has begun."""
        future = self.post("create_model", self.create(session, number, **changes))
        assert future.status_code == 200, future.text
        return self.result(future)["model_id"]

    def finish(self, model: str) -> None:
        """End a run with its session, so that its worker leaves its place to others."""
        session = model.partition(":")[0]
        answer = self.post(f"sessions/{session}/finish", {"reason": {"type": "success"}})
        assert answer.status_code == 204, answer.text

    def create(self, session: str, number: int = 0, **changes: Any) -> dict[str, Any]:
        body = {"session_id": session, "model_seq_id": number, "base_model": "tiny-chat"}
        return {**body, "lora_config": {"rank": 4, "seed": 3}, "type": "create_model", **changes}

    def rows(self, model: str, seq: int, rows: Sequence[Row] = ROWS, **how: Any) -> httpx.Response:
        """Send a forward_backward."""
        headers = {"content-type": "application/x-protobuf"}
        content = message_of(model, seq, rows, **how)
        return self.http.post("/api/v1/forward_backward", content=content, headers=headers)

    def step(self, model: str, seq: int, lr: float = 0.01) -> httpx.Response:
        params = {"learning_rate": lr, "beta1": 0.9, "beta2": 0.95, "eps": 1e-12}
        return self.post("optim_step", {"adam_params": params, "model_id": model, "seq_id": seq})

    def retrieve(self, request_id: str) -> httpx.Response:
        return self.post("retrieve_future", {"request_id": request_id})

    def result(self, future: httpx.Response | str) -> Any:
        """What a future gives: JSON, or the protobuf of rows."""
        name = future if isinstance(future, str) else future.json()["request_id"]
        answer = self.retrieve(name)
        for _ in range(20):
            if answer.status_code != 408:
                break
            answer = self.retrieve(name)
        assert answer.status_code == 200, answer.text
        if answer.headers["content-type"] == "application/x-protobuf":
            return wire.ForwardBackwardOutput.FromString(answer.content)
        return answer.json()


def driver(service: Service, token: str | None = None) -> Driver:
    """A client of a service, with a token in a key as the SDK wants it."""
    headers = {"x-api-key": f"tml-{token or 'none'}"}
    return Driver(httpx.Client(base_url=service.url, headers=headers, timeout=60))
