"""The code of this project, stored once for all tests of a process that submit it."""

from __future__ import annotations

import atexit
import functools
import shutil
import tempfile
from pathlib import Path

from jobs.code.snapshot import Snapshot, take
from jobs.record.paths import BaseFolder
from jobs.submit import prepare


@functools.cache
def our_code() -> Snapshot:
    """The snapshot of the project, in a folder of its own."""
    folder = Path(tempfile.mkdtemp(prefix="lathe-code-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return take(prepare.PROJECT, BaseFolder(folder), allow_dirty=True)


def lay_code_into(base: Path) -> None:
    """Put that snapshot into a savedir_base by a link: a submission then finds its code there. To
    write a thousand files and to remove them again takes 1.5 CPU seconds.
    """
    snapshots = BaseFolder(base).snapshots
    snapshots.mkdir(parents=True)
    (snapshots / our_code().digest).symlink_to(our_code().tree.parent)
