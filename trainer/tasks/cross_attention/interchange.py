"""Exports trained layers as a folder that refers to its base, or one that holds it."""

from __future__ import annotations

import logging
from pathlib import Path

from trainer.files.atomic import new_folder, refuse_existing
from trainer.tasks.cross_attention.decoder import export

log = logging.getLogger(__name__)


def export_model(folder: Path, *, out: Path, merge: bool = False) -> None:
    """Write a best/ or final/ folder of a run as a folder that `reader.Reader` and plain
    transformers open.

    merge: write the base's weights into it as well. ConfigError when the folder is no export of
    ours or `out` exists, ResumeError when its base has changed; `out` is written whole or not at
    all.
    """
    refuse_existing(out)
    export.read_description(folder)
    with new_folder(out) as new:
        write = export.merge if merge else export.copy
        write(folder, new, export.places_of(folder, cache_dir=Path("tmp-cache")))
    log.info("wrote %s", out)
