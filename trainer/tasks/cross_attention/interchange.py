"""Trained layers for elsewhere: a folder that refers to its base, or one that holds it."""

from __future__ import annotations

import logging
from pathlib import Path

from trainer.files.atomic import new_folder, refuse_existing
from trainer.tasks.cross_attention.decoder import export

log = logging.getLogger(__name__)


def export_model(folder: Path, *, out: Path, merge: bool = False) -> None:
    """Write a best/ or final/ folder of a run as one that `reader.Reader` and plain transformers
    open.

    merge: with the base's weights in it, so that nothing else is needed. ConfigError when the
    folder is no export of ours or `out` exists, ResumeError when its base is another by now;
    nothing half-written is left.
    """
    refuse_existing(out)
    export.described(folder)
    with new_folder(out) as new:
        write = export.merge if merge else export.copy
        write(folder, new, export.places_of(folder, cache_dir=Path("tmp-cache")))
    log.info("wrote %s", out)
