"""The end of a conversation as a template writes it, without writing the turns before.

What opens an answer may depend on what was said. A rendering of all turns before each answer tells
it, in a time that grows with the square of the turns. Here the loop over the turns begins near
the end instead. What the turns that are left out may have left behind in namespaces, which are all
that one turn of a loop can leave to the next, is unknown: whoever reads it gets Unknown, and not a
wrong value. Everything else is written from the whole conversation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from jinja2 import nodes
from jinja2.utils import Namespace

from trainer.data.chat.templates.tree import turns_of

_REST, _PLACE = "rest_of_turns", "place_of_turn"  # functions that the template is given
# What keeps a state between turns, or depends on chance, besides namespaces.
_STATEFUL = frozenset({"cycler", "joiner", "lipsum"})
# Filters whose result is used up by whoever reads it, and those that read all of one at once.
_LAZY = frozenset(
    {"batch", "items", "map", "reject", "rejectattr", "reverse", "select", "selectattr", "slice"}
    | {"unique"}
)
_EAGER = frozenset(
    {"count", "first", "join", "last", "length", "list", "max", "min", "sort", "sum"}
)
_OF_LOOP = frozenset(  # what our shift of a loop keeps right
    {"cycle", "depth", "depth0", "first", "index", "index0", "last", "length", "nextitem"}
    | {"previtem", "revindex", "revindex0"}
)
_ELSEWHERE = (nodes.Block, nodes.Extends, nodes.FromImport, nodes.Import, nodes.Include)


class Unknown(Exception):
    """A template reads what a turn that was left out may have written."""


class Resumption:
    """Functions for one rendering whose loop over the turns begins `size` turns before its end.

    names: the attributes of namespaces that a turn may write (resumable). is_late: whether the last
    turn stands already before that loop, of which no turn is left out then.
    """

    def __init__(self, names: frozenset[str], size: int, is_late: Callable[[], bool]) -> None:
        self._names, self._size, self._is_late = names, size, is_late
        self._made: list[_Values] = []  # of the namespaces
        self._before: Sequence[Any] = ()  # the turns that are left out

    def functions(self) -> dict[str, Any]:
        """The functions by the names that a resumable template calls."""
        return {"namespace": self._namespace, _REST: self._rest, _PLACE: self._place}

    def _namespace(self, *args: Any, **values: Any) -> Namespace:
        state = _Values(*args, **values)
        self._made.append(state)
        return _Namespace(state)

    def _rest(self, turns: Any) -> Any:
        """What the loop goes through; from here on the state of the turns left out is unknown."""
        if not isinstance(turns, list) or len(turns) <= self._size or self._is_late():
            return turns
        for values in self._made:
            values.forget(self._names)
        self._before = turns[: -self._size]
        return _Rest(turns, self._size)

    def _place(self, loop: Any) -> str:
        """Nothing to write. In its first turn the loop is told how many there were before."""
        if self._before and loop.first:
            loop.index0 += len(self._before)
            loop._before = self._before[-1]  # Jinja 3.1 reads its item before from it
        return ""


class _Rest:
    """The last turns of a list that has the length of all."""

    def __init__(self, turns: list[Any], size: int) -> None:
        self._turns, self._size = turns, size

    def __iter__(self) -> Iterator[Any]:
        return iter(self._turns[-self._size :])

    def __len__(self) -> int:
        return len(self._turns)


class _Values(dict[str, Any]):
    """The values of a namespace, some of which are unknown until they are written again."""

    unknown: frozenset[str] = frozenset()

    def forget(self, names: frozenset[str]) -> None:
        """Make the values of these names unknown."""
        self.unknown = names
        for name in names:
            self.pop(name, None)

    def __missing__(self, name: str) -> Any:
        if name in self.unknown:
            raise Unknown(name)
        raise KeyError(name)

    def __repr__(self) -> str:
        if self.unknown:
            raise Unknown("all")
        return super().__repr__()


class _Namespace(Namespace):
    """A namespace with values of ours."""

    def __init__(self, values: _Values) -> None:
        self._Namespace__attrs = values  # where jinja2 3.1 keeps them


def resumable(tree: nodes.Template) -> frozenset[str] | None:
    """The attributes of namespaces that a turn may write, after a change of the tree that lets
    Resumption choose where its loop over the turns begins; None, and no change, for a template
    whose turns may leave something behind that is in no namespace.
    """
    place = turns_of(tree)
    if place is None:
        return None
    loop = place.loop
    if loop.test is not None or loop.recursive or not isinstance(loop.target, nodes.Name):
        return None
    before = [part for part in tree.body[: place.number] if not isinstance(part, nodes.Macro)]
    given_names = nodes.Scope(before).find_all(nodes.Assign)
    keeps_an_iterator = any(_is_lazy(one.node) for one in given_names)  # it can be read only once
    if _keeps_a_state(tree) or _leaves(loop) or keeps_an_iterator:
        return None
    macros = tree.find_all(nodes.Macro)
    written = [one for part in (loop, *macros) for one in part.find_all(nodes.NSRef)]
    loop.iter = nodes.Call(nodes.Name(_REST, "load"), [loop.iter], [], None, None)
    call = nodes.Call(nodes.Name(_PLACE, "load"), [nodes.Name("loop", "load")], [], None, None)
    loop.body = [nodes.Output([call]).set_lineno(loop.lineno), *loop.body]
    loop.set_lineno(loop.lineno)  # of what is new
    return frozenset(one.attr for one in written)


def _keeps_a_state(tree: nodes.Template) -> bool:
    """Whether a template may have a state in something else than a namespace."""
    parts = tree.find_all((*_ELSEWHERE, nodes.Name, nodes.Filter, nodes.Getattr))
    return any(
        isinstance(one, _ELSEWHERE)
        or (isinstance(one, nodes.Name) and one.name in _STATEFUL)
        or (isinstance(one, nodes.Filter) and one.name == "random")
        or (isinstance(one, nodes.Getattr) and one.attr == "changed")
        for one in parts
    )


def _leaves(loop: nodes.For) -> bool:
    """Whether a loop may end before its last turn, or is told of where we do not know it."""
    ids = [
        id(one.node)
        for one in loop.find_all(nodes.Getattr)
        if isinstance(one.node, nodes.Name) and one.attr in _OF_LOOP
    ]
    names = [one for one in loop.find_all(nodes.Name) if one.name == "loop"]
    return any(id(one) not in ids for one in names) or any(_breaks(one) for one in loop.body)


def _breaks(part: nodes.Node) -> bool:
    """Whether a part of a loop's body may end that loop."""
    parts = part.else_ if isinstance(part, nodes.For) else part.iter_child_nodes()
    return isinstance(part, nodes.Break) or any(_breaks(one) for one in parts)


def _is_lazy(value: nodes.Node) -> bool:
    match value:
        case nodes.Filter(name=name) if name in _LAZY:
            return True
        case nodes.Filter(name=name) if name in _EAGER:  # map("items") has lazy items itself
            constants = [one.value for one in value.find_all(nodes.Const)]
            return any(isinstance(one, str) and one in _LAZY for one in constants)
        case _:
            return any(_is_lazy(one) for one in value.iter_child_nodes())
