"""Pages of lists, whose cursor (`after`) is the id of the last object of the page before."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from jobs.serve.index import Page
from jobs.serve.requests import PageQuery, Refusal, quote


def page_of(look: Callable[[], Page], after: str | None) -> Page:
    """The page that `look` returns. Refusal when there is no object `after`."""
    try:
        return look()
    except KeyError:
        raise Refusal(400, f"after: there is no {quote(after)} here.", param="after") from None


def cut(objects: Sequence[dict[str, Any]], query: PageQuery) -> Page:
    """The page of a whole list. Refusal when there is no object `after`."""
    ids = [one["id"] for one in objects]
    if query.after is not None and query.after not in ids:
        raise Refusal(400, f"after: there is no {quote(query.after)} here.", param="after")
    start = ids.index(query.after) + 1 if query.after is not None else 0
    rest = objects[start + query.limit :]
    return Page(list(objects[start : start + query.limit]), bool(rest))
