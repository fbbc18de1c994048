"""A worker of driven runs that computes sums in place of a model: it follows the log of operations
and writes results as the real one does, and starts in a moment.

The "weights" are one number w. A token t has the log-probability -(1 + t % 7) / 10 - w, a gradient is
the number of tokens, and a step of the optimizer adds its learning rate times the gradient to w.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = """#!{python}
import json, os, shutil, signal, sys, time
sys.path.insert(0, {root!r})
import numpy as np
from pathlib import Path
from trainer.files.atomic import write_json
from trainer.operations.operation_log import OperationReader
from trainer.operations.results import ResultWriter, work_of
from trainer.operations.rows import outputs_to_payload, rows_of

flags = dict(word[2:].split("=", 1) for word in sys.argv[2:] if "=" in word)
run = Path(flags["savedir_base"]) / flags["exp_id"]
with open({starts!r}, "a") as file:
    file.write(flags["exp_id"] + "\\n")
stop = []
signal.signal(signal.SIGTERM, lambda *_: stop.append(1))
what = json.loads(open({what!r}).read())
reader, results = OperationReader(run / "operations"), ResultWriter(run / "operations")
state = {{"w": 0.0, "grad": 0.0, "steps": 0}}


def say(name):
    status = {{"state": name, "step": state["steps"], "total": None}}
    write_json(run / "status.json", status)


def folder_of(part, name, overwrite):
    folder = run / part / name
    if folder.exists() and not overwrite:
        raise ValueError(name + " is there")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


def perform(one):
    fields = one.fields
    if one.kind == "refused":
        return {{"error": fields["error"], "category": "user"}}, b""
    if one.kind in ("forward", "forward_backward"):
        logprobs, loss, count = [], 0.0, 0
        for row in rows_of(one.payload, fields["inputs"]):
            target = row.inputs["target_tokens"]
            if target.max() >= 512:
                return {{"error": "a token beyond the vocabulary", "category": "user"}}, b""
            logprob = (-(1 + target % 7) / 10 - state["w"]).astype(np.float32)
            weights = row.inputs.get("weights", np.ones(target.shape, np.float32))
            loss -= float((logprob * weights).sum())
            count += target.size
            logprobs.append(logprob)
        if one.kind == "forward_backward":
            state["grad"] += count
        trailing = fields["inputs"]["target_tokens"]["trailing"]
        outputs = {{"logprobs": {{"trailing": trailing}}}}
        found = {{"metrics": {{"loss:sum": loss}}, "outputs": outputs}}
        return found, outputs_to_payload({{"logprobs": logprobs}})
    if one.kind == "optim_step":
        state["w"] += fields["learning_rate"] * state["grad"]
        state["grad"], state["steps"] = 0.0, state["steps"] + 1
        return {{"metrics": {{"w": state["w"]}}}}, b""
    if one.kind == "save_state":
        folder = folder_of("saved", fields["name"], fields["overwrite"] or one.seq <= results.last_seq)
        (folder / "step-1").mkdir()
        (folder / "step-1" / "state.json").write_text(json.dumps(state))
        place = "saved/" + fields["name"] + "/step-1"
        return {{"folder": place, "sha256": "0" * 64, "bytes": 10}}, b""
    if one.kind == "save_for_sampler":
        folder = folder_of("sampler", fields["name"], True)
        (folder / "adapter_config.json").write_text("{{}}")
        (folder / "adapter_model.safetensors").write_bytes(str(state["w"]).encode())
        return {{"folder": "sampler/" + fields["name"]}}, b""
    if one.kind == "load_state":
        before = json.loads((Path(fields["folder"]) / "state.json").read_text())
        state["w"] = before["w"]
        if fields["with_optimizer"]:
            state["steps"] = before["steps"]
        return {{"path": fields.get("path")}}, b""
    return {{}}, b""


say("running")
since = time.monotonic()
while True:
    if stop or os.path.exists({over!r}):
        say("preempted")
        sys.exit(75)
    one = reader.next()
    if one is None:
        if time.monotonic() - since > what.get("put_aside_s", 1e9):
            say("paused")
            sys.exit(10)
        time.sleep(0.003)
        continue
    since = time.monotonic()
    if one.kind == what.get("dies_at") and one.seq > results.last_seq:
        open({what!r}, "w").write("{{}}")
        os.kill(os.getpid(), signal.SIGKILL)
    if one.kind == what.get("disk_full_at") and one.seq > results.last_seq:
        open({what!r}, "w").write("{{}}")
        status = {{"state": "failed", "step": 0, "total": None, "error": "StorageError: no space left"}}
        write_json(run / "status.json", status)
        sys.exit(2)
    began = time.time()
    fields, payload = perform(one)
    time.sleep(what.get("work_s", 0.0))
    results.append(one.seq, fields, payload, work=work_of(one, began))
    say("running")
    if one.kind == "end":
        say("succeeded")
        sys.exit(0)
"""


class DrivenStub:
    """The stand-in for the worker of driven runs."""

    def __init__(self, folder: Path) -> None:
        self.what, self.python = folder / "what", folder / "bin" / "python"
        self.starts_file, self.over = folder / "starts", folder / "over"
        self.python.parent.mkdir(parents=True)
        names = {"what": str(self.what), "starts": str(self.starts_file), "root": str(ROOT)}
        names["over"] = str(self.over)
        self.python.write_text(SCRIPT.format(python=sys.executable, **names))
        self.python.chmod(0o755)
        self.says()

    def says(self, text: str = "{}") -> None:
        """How workers behave from their next start on: put_aside_s, dies_at (a kind)."""
        self.what.write_text(text)

    def starts(self) -> list[str]:
        """Ids of experiments, in the order in which their workers began."""
        return self.starts_file.read_text().split() if self.starts_file.exists() else []

    def __enter__(self) -> DrivenStub:
        return self

    def __exit__(self, *_: object) -> None:
        """End all workers, once the server has ended that would begin them again."""
        self.over.touch()
