"""The states of a driven run: those that it goes on from, and those that its client saves.

    checkpoints/step-<n>/        written by itself, after optim_step n (training/checkpoint.py)
    saved/NAME/step-<n>/         of save_state, in the same layout

Their state.json says under "driven" behind which operation they stand.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainer.driven.replacement import refuse_others, replace
from trainer.errors import ConfigError, DataError, LatheError
from trainer.operations.operation_log import FOLDER, note_states
from trainer.runtime import distributed
from trainer.runtime.beside import Beside
from trainer.runtime.distributed import on_main
from trainer.training import checkpoint
from trainer.training.checkpoint import Checkpoint
from trainer.training.engine import Engine
from trainer.training.session import Progress

logger = logging.getLogger(__name__)

DRIVEN, AFTER = "driven", "after_seq"  # keys of state.json
SAVED, SAMPLER = "saved", "sampler"  # folders of a run
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")

# (progress, what stands under "driven", folder of steps) -> a function that writes the present
# state there, as a collective for another thread
Snapshot = Callable[[Progress, Mapping[str, Any], Path], Callable[[], Path]]


def check_name(name: Any) -> str:
    """The name of a saved state; ConfigError when it is no name of a folder."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ConfigError(
            f"name={name!r}: want letters, digits, '.', '_' and '-', at most 200, the first a "
            "letter or digit. Give such a name."
        )
    return name


@dataclass
class States:
    """Writes and reads the states of one run."""

    folder: Path  # of the run
    snapshot: Snapshot
    base: str  # the fingerprint of the base
    saves: Beside = field(default_factory=Beside)

    @property
    def checkpoints(self) -> Path:
        return self.folder / "checkpoints"

    def keep(self, progress: Progress, after: int) -> None:
        """Write the present state, behind operation `after`, beside what follows. No gradient may
        be pending. A collective.
        """
        write = self.snapshot(progress, {AFTER: after}, self.checkpoints)

        def work() -> None:
            write()
            if distributed.is_main():
                self._note()

        self.saves.start(work)

    def _note(self) -> None:
        """Write down which states there are. Rank 0 alone: if it fails, the state is safe all the
        same, and the server drops fewer operations.
        """
        try:
            note_states(self.folder / FOLDER, after_seqs(self.checkpoints))
        except LatheError as error:
            logger.warning("old operations stay: %s", error)

    def save(
        self, progress: Progress, seq: int, *, name: str, overwrite: bool
    ) -> dict[str, str | int]:
        """Write the present state as saved/NAME; operation `seq` asks for it. Returns its folder
        (relative to the run's), the sha256 of its weights and moments, and its bytes. A collective.

        ConfigError when the name is there already and overwrite is False.
        """
        root = self.folder / SAVED / check_name(name)

        def place() -> str | None:
            """A state that this very operation has written before it was killed."""
            present = checkpoint.newest_good(root)
            if present is None:
                return None
            if checkpoint.read_state(present)[DRIVEN] == {AFTER: seq}:
                return present.name
            if not overwrite:
                raise ConfigError(
                    f"save_state: {name!r} is there already. Give another name, or overwrite it."
                )
            return None

        present = on_main(place)
        if present is None:
            write = self.snapshot(progress, {AFTER: seq}, root)
            names: list[str] = []
            self.saves.start(lambda: names.append(write().name))
            self.saves.wait()
            present = names[0]
        return on_main(lambda: about(self.folder, root / present))

    def load(self, engine: Engine, fields: Mapping[str, Any], *, has_gradient: bool) -> None:
        """Replace the engine's weights and moments by those of a folder saved/NAME, of this run or
        another one. A gradient that is pending is dropped. A collective.

        DataError for one that is absent, altered or of another base; CheckpointError for one whose
        weights do not fit. Then nothing has changed.
        """
        folder = self.folder / str(fields.get("folder"))  # an absolute one stays as it is

        def look() -> str:
            if not folder.is_dir():
                raise DataError(
                    f"load_state: there is no folder {folder}. Give one that save_state returned."
                )
            own = folder / checkpoint.MANIFEST
            state = folder if own.is_file() else (checkpoint.newest_good(folder) or folder)
            wrong = checkpoint.problems(state)
            sha256 = fields.get("sha256")
            if not wrong and sha256 is not None and content_sha256(state) != sha256:
                wrong = [f"sha256 {content_sha256(state)}, want {sha256}"]
            if wrong:
                raise DataError(
                    f"load_state: {state} is not what was saved ({'; '.join(wrong)}). Load another."
                )
            base = checkpoint.read_state(state).get("identity", {}).get("base")
            if base != self.base:
                raise DataError(
                    f"load_state: {state} was trained on the base {base}, this run has "
                    f"{self.base}. Load a state of this base."
                )
            return str(state)

        state = Path(on_main(look))
        self.saves.wait()
        saved = Checkpoint(state)
        refuse_others(engine, saved)
        if has_gradient:  # of weights that are going
            engine.leave_out()
        replace(engine, saved, with_optimizer=bool(fields.get("with_optimizer")))


def about(run: Path, folder: Path) -> dict[str, str | int]:
    """The folder saved/NAME, sha256 and bytes of a saved state, which lies in `folder`."""
    size = sum(path.stat().st_size for path in folder.iterdir())
    return {
        "folder": str(folder.parent.relative_to(run)),
        "sha256": content_sha256(folder),
        "bytes": size,
    }


def content_sha256(folder: Path) -> str:
    """One digest of the weights and moments of a saved state, out of its manifest."""
    manifest = json.loads((folder / checkpoint.MANIFEST).read_text())
    files = {one["name"]: one["sha256"] for one in manifest["files"]}
    kept = {name: sha for name, sha in files.items() if name.startswith(("weights-", "optimizer-"))}
    return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()


def after_seqs(checkpoints: Path) -> list[int]:
    """Behind which operations the states of a run stand, oldest first."""
    states = [checkpoint.read_state(folder) for _, folder in checkpoint.candidates(checkpoints)]
    return sorted(int(state[DRIVEN][AFTER]) for state in states)
