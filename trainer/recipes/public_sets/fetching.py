"""A public set, downloaded, checked against its digests and written in the layout that our groups
want: all of it, or nothing.
"""

from __future__ import annotations

import logging
import shutil
import urllib.error
import urllib.request
from http.client import HTTPException
from pathlib import Path
from urllib.parse import quote

from trainer.data.formats.packed import open_file
from trainer.errors import DataError, LatheError, nearest
from trainer.files.atomic import new_folder, sha256_of, size_of
from trainer.recipes.public_sets import layouts
from trainer.recipes.public_sets.catalogue import SETS, TOKENIZERS, PublicFile, PublicSet

SOURCE_FILE = "SOURCE.md"
_TIMEOUT_S = 60.0

log = logging.getLogger(__name__)


def set_of(name: str) -> PublicSet:
    """The set of this name; DataError when there is none."""
    if name not in SETS:
        raise DataError(f"set {name!r} does not exist. {nearest(name, list(SETS))}")
    return SETS[name]


def fetch(name: str, out: Path, *, mirror: str | None = None) -> None:
    """Write the set `name` as the folder `out`, which must not exist yet.

    mirror: where to read <mirror>/<set>/<file> instead of the publishers' addresses. LatheError
    when a file cannot be had, DataError when it is not what was published; `out` is then not there.
    """
    public = set_of(name)
    with new_folder(out) as folder:
        for file in public.files:
            url = file.url if mirror is None else f"{mirror.rstrip('/')}/{name}/{quote(file.name)}"
            _download(file, url, folder / file.name)
        layouts.lay_out(public.layout, folder)
        files = "\n".join(
            f"- {file.name}: {file.url}, sha256 {file.sha256}" for file in public.files
        )
        about = (
            f"# {name}\n\n{public.about}.\n\nLicence: {public.licence}.\n\nFetched by "
            f"`python -m trainer fetch {name}` from:\n\n{files}\n"
        )
        (folder / SOURCE_FILE).write_text(about, encoding="utf-8")


def fetch_tokenizers(out: Path) -> dict[str, str]:
    """Write those tokenizers of the built-in groups that the Hub gives as folders below `out`.

    Returns by name why others could not be had: starcoder's wants its licence accepted first. A
    folder that is there already is left alone.
    """
    from transformers import AutoTokenizer

    missing: dict[str, str] = {}
    for name, hub_id in TOKENIZERS.items():
        if (out / name).exists():
            log.info("%s is there already", out / name)
            continue
        try:
            tokenizer = AutoTokenizer.from_pretrained(hub_id, trust_remote_code=False)
        except (OSError, ValueError) as error:
            missing[name] = f"{hub_id}: {str(error).strip().splitlines()[0]}"
            continue
        with new_folder(out / name) as folder:
            tokenizer.save_pretrained(str(folder))
        log.info("%s from %s", out / name, hub_id)
    return missing


def _download(file: PublicFile, url: str, target: Path) -> None:
    log.info("%s from %s", file.name, url)
    # the published file is packed where ours is not; a mirror keeps it as we do
    is_packed = url.endswith(".gz") and target.suffix != ".gz"
    fetched = target.with_name(f"{target.name}.gz") if is_packed else target
    try:
        with (
            urllib.request.urlopen(url, timeout=_TIMEOUT_S) as answer,
            fetched.open("wb") as content,
        ):
            shutil.copyfileobj(answer, content)
        if is_packed:
            with open_file(fetched) as packed, target.open("wb") as content:
                shutil.copyfileobj(packed, content)
            fetched.unlink()
    except (urllib.error.URLError, HTTPException, TimeoutError, EOFError, ValueError) as error:
        reason = getattr(error, "reason", None) or error
        raise LatheError(
            f"{url} cannot be fetched: {reason}. Try again, or give --mirror an address or a "
            "folder that has the file."
        ) from error
    digest = sha256_of(target)
    if digest != file.sha256:
        raise DataError(
            f"{url}: got sha256 {digest} of {size_of(target.stat().st_size)}, want {file.sha256}: "
            "it was changed since, or on the way. Fetch it elsewhere and give it by --mirror."
        )
