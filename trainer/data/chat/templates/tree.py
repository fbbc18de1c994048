"""What a chat template can do, as far as its syntax tree tells."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from jinja2 import nodes

# A place in a template whose text the template itself can read.
_CAPTURES = (nodes.AssignBlock, nodes.Block, nodes.CallBlock, nodes.FilterBlock, nodes.Macro)
# What every template is given besides the conversation.
GIVEN = frozenset({"add_generation_prompt", "date_string", "documents"})
_OF_CONVERSATION = frozenset({"messages", "tools", "loop", "self", "caller"})
_SIMPLE = {"d", "default"}  # filters of a setting
_OF_EARLIER = {"first", "index", "index0", "previtem"}  # what a loop tells without later turns


def captured_loops(tree: nodes.Node) -> set[int]:
    """id() of each loop whose text the template can read, instead of only writing it."""
    recursive = [loop for loop in tree.find_all(nodes.For) if loop.recursive]
    places = [*tree.find_all(_CAPTURES), *recursive]
    inside = [loop for place in places for loop in place.find_all(nodes.For)]
    return {id(loop) for loop in (*inside, *recursive)}


def is_forward(tree: nodes.Node) -> bool:
    """Whether no turn's text can depend on a later turn: the template goes through the messages
    once, and sees of them only the first one and those that it has come to.

    False also for a template that is merely not understood.
    """
    names = _names_of_messages(tree)
    loops = [loop for loop in tree.find_all(nodes.For) if _is_messages(loop.iter, names)]
    return (
        len(loops) == 1
        and not loops[0].recursive
        and not _looks_ahead(tree, names, loops[0], is_in_turn=False)
    )


@dataclass(frozen=True)
class Turns:
    """The loop that writes the turns, which is the part `number` of a template."""

    number: int
    loop: nodes.For


def turns_of(tree: nodes.Template) -> Turns | None:
    """The loop that writes the turns, where one part of a template and no other may write some;
    else None.
    """
    read = _names_of_conversation(tree)
    writing = [
        Turns(number, loop)
        for number, part in enumerate(tree.body)
        if not isinstance(part, nodes.Macro)
        for loop in nodes.Scope([part]).find_all(nodes.For)  # the part itself, too
        if writes(loop) and _may_be_turns(loop.iter, read)
    ]
    outer = [one for one in writing if one.loop is tree.body[one.number]]
    if len({one.number for one in writing}) != 1 or not outer:
        return None
    turns = outer[0]
    is_known = _is_messages(turns.loop.iter, _names_of_messages(tree)) and not turns.loop.else_
    return turns if is_known else None


def constant_tail(tree: nodes.Template) -> list[nodes.Node] | None:
    """The part of a template behind its turns, if it writes the same behind every conversation;
    None if it may read one, or if it is not known where the turns end.
    """
    turns = turns_of(tree)
    if turns is None:
        return None
    read = _names_of_conversation(tree)
    tail = tree.body[turns.number + 1 :]
    if "add_generation_prompt" not in read:
        tail = [one for part in tail for one in _where_opened(part)]
    is_constant = all(_is_constant(part, read) for part in tail)
    return [*_settings(tree, tree.body[: turns.number]), *tail] if is_constant else None


def _settings(tree: nodes.Node, parts: Iterable[nodes.Node]) -> list[nodes.Assign]:
    """Those parts of a template that give a name its only value, which is the same in every
    conversation: defaults of what a template may be given.
    """
    names = [one.name for one in tree.find_all(nodes.Name) if one.ctx != "load"]
    settings: list[nodes.Assign] = []
    read = {*_OF_CONVERSATION, *names, *(one.name for one in tree.find_all(nodes.Macro))}
    for part in parts:
        if isinstance(part, nodes.Assign) and isinstance(part.target, nodes.Name):
            name = part.target.name
            calls = part.find_all((nodes.Call, nodes.Filter))
            is_simple = all(isinstance(one, nodes.Filter) and one.name in _SIMPLE for one in calls)
            is_simple = is_simple and names.count(name) == 1 and name not in GIVEN
            if is_simple and _is_constant(part.node, read - {name}):
                settings.append(part)
                read.discard(name)
    return settings


def _may_be_turns(value: nodes.Node, read: set[str]) -> bool:
    """Whether the items of a value may be messages: those of a field are none."""
    if isinstance(value, nodes.Filter) and value.node is not None and not value.args:
        return _may_be_turns(value.node, read)
    is_field = isinstance(value, nodes.Getattr) or (
        isinstance(value, nodes.Getitem)
        and isinstance(value.arg, nodes.Const)
        and isinstance(value.arg.value, str)
    )
    return not is_field and not _is_constant(value, read - {"tools"})


def _where_opened(part: nodes.Node) -> list[nodes.Node]:
    """What is left of a part of a template when add_generation_prompt is true."""
    match part:
        case nodes.If(test=nodes.Name(name="add_generation_prompt")):
            return list(part.body)
        case _:
            return [part]


def writes(loop: nodes.For) -> bool:
    """Whether a loop may write something."""
    return any(loop.find_all((nodes.Output, nodes.CallBlock, nodes.Include)))


def _names_of_conversation(tree: nodes.Node) -> set[str]:
    """The names that may stand for something else with another conversation."""
    defaults = {
        id(one.target)
        for choice in tree.find_all(nodes.If)
        for one in choice.body
        if isinstance(one, nodes.Assign) and _is_undefined(choice.test, one.target)
    }
    targets = [one for one in tree.find_all(nodes.Name) if one.ctx != "load"]
    defaults |= {id(one.target) for one in _settings(tree, tree.iter_child_nodes())}
    names = {one.name for one in targets if id(one) not in defaults}
    names |= {one.name for one in tree.find_all(nodes.Macro)}
    return names | _OF_CONVERSATION


def _is_undefined(test: nodes.Node, target: nodes.Node) -> bool:
    """Whether a test holds only if a name is missing that is given with every conversation."""
    if isinstance(test, nodes.Not):
        test, name = test.node, "defined"
    else:
        name = "undefined"
    return (
        isinstance(test, nodes.Test)
        and test.name == name
        and isinstance(test.node, nodes.Name)
        and isinstance(target, nodes.Name)
        and test.node.name == target.name
        and target.name in GIVEN
    )


def _is_constant(part: nodes.Node, read: set[str]) -> bool:
    names = [part] if isinstance(part, nodes.Name) else part.find_all(nodes.Name)
    return not any(one.name in read for one in names)


def _names_of_messages(tree: nodes.Node) -> set[str]:
    names, wider = set[str](), {"messages"}
    while wider != names:
        names = wider
        wider = names | {
            one.target.name
            for one in tree.find_all(nodes.Assign)
            if isinstance(one.target, nodes.Name) and _is_messages(one.node, names)
        }
    return names


def _is_messages(value: Any, names: set[str]) -> bool:
    """Whether an expression is the messages, or those behind the first one."""
    if isinstance(value, nodes.Getitem) and isinstance(value.arg, nodes.Slice):
        bounds = value.arg
        start = bounds.start
        is_near = start is None or (isinstance(start, nodes.Const) and start.value in (0, 1))
        is_tail = bounds.stop is None and bounds.step is None and is_near
        return is_tail and _is_messages(value.node, names)
    return isinstance(value, nodes.Name) and value.name in names


def _looks_ahead(node: nodes.Node, names: set[str], turns: nodes.For, *, is_in_turn: bool) -> bool:
    """Whether a part of a template may read later messages.

    turns: the loop over the messages. is_in_turn: whether `loop` is that loop in this part.
    """
    match node:
        case nodes.For():
            is_turns = node is turns
            parts = [(one, is_turns) for one in (*node.body, node.test) if one is not None]
            parts += [(one, is_in_turn) for one in node.else_]
            parts += [] if is_turns else [(node.iter, is_in_turn)]
        case nodes.Assign(target=nodes.Name()) if _is_messages(node.node, names):
            return False
        case nodes.Getitem(node=nodes.Name(name=name), arg=nodes.Const(value=0)) if name in names:
            return False
        case nodes.Test(name="defined", node=nodes.Name()):
            return False
        case nodes.Getattr(node=nodes.Name(name="loop"), attr=attr) if is_in_turn:
            return attr not in _OF_EARLIER
        case nodes.Name(name=name, ctx="load"):
            return name in names or (name == "loop" and is_in_turn)
        case _:
            parts = [(one, is_in_turn) for one in node.iter_child_nodes()]
    return any(_looks_ahead(one, names, turns, is_in_turn=place) for one, place in parts)
