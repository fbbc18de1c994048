"""Faults in what opens an answer of a conversation."""

from tests.mutants.fault import Fault

CHAT = "tests/unit/test_chat.py"
OPENINGS = "tests/unit/test_chat_openings.py"

FAULTS = [
    Fault(
        "trainer/data/chat/templates/tree.py",
        "return [*_settings(tree, tree.body[: turns.number]), *tail] if is_constant else None",
        "return [*_settings(tree, tree.body[: turns.number]), *tail]",
        why="an opening that a conversation chooses is that of no conversation",
        tests=CHAT,
    ),
    Fault(
        "trainer/data/chat/templates/tree.py",
        "is_simple = is_simple and names.count(name) == 1 and name not in GIVEN",
        "is_simple = is_simple and name not in GIVEN",
        why="a default that a conversation replaces is taken for what opens its answers",
        tests=CHAT,
    ),
    Fault(
        "trainer/data/chat/templates/resumption.py",
        "if name in self.unknown:",
        "if name is self.unknown:",
        why="what earlier turns left is taken for missing, and the mask is of another opening",
        tests=OPENINGS,
    ),
    Fault(
        "trainer/data/chat/templates/resumption.py",
        "loop.index0 += len(self._before)",
        "loop.index0 += 0",
        why="the turns that are written are numbered as if there were none before",
        tests=OPENINGS,
    ),
    Fault(
        "trainer/data/chat/templates/resumption.py",
        "if not isinstance(turns, list) or len(turns) <= self._size or self._is_late():",
        "if not isinstance(turns, list) or len(turns) <= self._size:",
        why="text behind the last turn is left out of what opens an answer",
        tests=OPENINGS,
    ),
    Fault(
        "trainer/data/chat/templates/resumption.py",
        "if _keeps_a_state(tree) or _leaves(loop) or keeps_an_iterator:",
        "if _keeps_a_state(tree) or _leaves(loop):",
        why="a template goes on with an iterator that earlier turns would have used up",
        tests=OPENINGS,
    ),
    Fault(
        "trainer/data/chat/templates/marks.py",
        "while self._names is not None and size < len(chat):",
        "while self._names is not None and size < 0:",
        why="the time for a conversation of Gemma 4 grows with the square of its turns",
        tests=OPENINGS,
    ),
]
