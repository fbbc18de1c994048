"""Lists that stand in a text: the one rule for every reader, task and kind of file.

A table has no lists, so programs write them as text: JSON, what Python prints (`['a', 'b']`), or
what numpy prints, which has no commas (`['a' 'b']`, `[10 11]`). Such a text is the list. Any other
text is a list of one, "[citation needed] ..." too, and so is a JSON object. A text that looks like
a list and cannot be read as one without doubt is refused.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Any, NamedTuple, NoReturn

from trainer.data.formats.json_text import BadJson, half_of_pair, json_value, preview
from trainer.errors import DataError

_MAX_DEPTH = 20  # lists and objects inside each other
_TOKEN = re.compile(
    r"""(?P<space>\s+)
    |(?P<text>[bBuU]?(?:'[^'\\]*(?:\\.[^'\\]*)*'|"[^"\\]*(?:\\.[^"\\]*)*"))
    |(?P<number>[-+]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][-+]?\d+)?(?![\w.]))
    |(?P<word>\.\.\.|(?:np\.|numpy\.)?[A-Za-z_]\w*)
    |(?P<mark>[][(){},:=])
    """,
    re.VERBOSE | re.DOTALL,
)
_CONSTANTS = {
    **{"None": None, "null": None, "True": True, "true": True, "False": False, "false": False},
    **{"nan": math.nan, "NaN": math.nan},
}
# What Python's repr writes behind a backslash.
_ESCAPE = re.compile(r"\\(?:([\\'\"nrt])|x([0-9a-f]{2})|u([0-9a-f]{4})|U([0-9a-f]{8})|(.))", re.S)
_ESCAPED = {"n": "\n", "r": "\r", "t": "\t"}
# array(['a'], dtype=object), in what numpy prints of nested arrays
_WRAPPERS = ("array", "list", "np.array", "numpy.array")
_SCALAR = re.compile(r"(?:np|numpy)\.\w+")  # np.str_('a'), np.int64(3): numpy 2's, in a list
_NUMPY_CONSTANTS = {"True_": True, "False_": False, "nan": math.nan}
_CLOSING = {"[": "]", "(": ")", "{": "}"}

_QUOTED = re.compile(r"""[bBuU]?(['"])""")
_NEXT_QUOTED = re.compile(r"""['"]\s*,\s*[bBuU]?['"]""")
_SURE = re.compile(
    r"""\[\s*(?:\[\s*['"]|\{\s*['"]|array\(|list\(|(?:np|numpy)\.\w+\()
    |\[\s*(?:\w+\.)*(?:tensor|Tensor|Array|Decimal|UUID|Timestamp|date|datetime|\w*Path|Row)\(
    |\[\s*(?:\\+['"]|&(?:quot|apos|\#3[49]);)  # quotes that were escaped once more
    |(['"])\s*\[\s*\\*['"].*['"]\s*\]\s*\1$  # a list in quotes
    |(?:\w+\.)*(?:tensor|Tensor|[Aa]rray)\(\s*\[
    |(?:tensor|(?:Wrapped)?Array|ArrayBuffer|ArraySeq|List)\([^()]*\)$  # of torch, of Scala
    |(?:c|list)\(\s*"[^"]*"(?:\s*,\s*"[^"]*")+\s*\)$  # of R
    |\{[^{}":]*,"[^"]*"[^{}:]*\}$  # an array of PostgreSQL
    |shape:\ \(\d+,?\)\s*\n\s*Series  # of polars
    |<[\w.]*(?:Array|Tensor|Index|Series)(?:>\s*\[|:\ shape=|\ object\ at\ 0x)
    |<[\w.\ <>]+\ at\ 0x[0-9a-f]+>$
    |(?:np\.|numpy\.)?array\(\s*\[
    |(?:np|numpy)\.(?:str_|bytes_|bool_|u?int\d+|float\d+)\(
    |\{\s*['"]
    |(?:frozenset|set|deque|Index|OrderedDict|o?dict_keys|o?dict_values)\(\s*[\[{(]
    |\[\s*[\u2018-\u201f\xab\xbb].*[\u2018-\u201f\xab\xbb]\s*\]$ # quotes of a word processor
    |.*\n(?:Name:\ .*,\ )?(?:Length:\ \d+,\ )?dtype:\ \w+$  # a Series of pandas
    """,
    re.VERBOSE | re.DOTALL,
)
# One bracket around a whole text, with a comma: "[Paris, Rome]" of Java, "{Paris,Rome}".
_UNQUOTED = re.compile(r"\[[^\[\]]*,[^\[\]]*\]|\{[^{}:]*,[^{}:]*\}")
_IN_BRACKETS = "texts in brackets with commas (one text each, not lists: their items lack quotes)"
# What programs write for a missing value where it becomes a text; "None" may be an answer, too.
_NO_VALUES = frozenset({"nan", "NaN", "None", "NULL", "null", "NaT", "<NA>", "\\N", "#N/A"})
_WORD_BEHIND = re.compile(r"[.:;!?]?\s+[^\W\d]")
_LIST_BEHIND = re.compile(r"""[\[({]\s*['"]|\bdtype[:=]""")
_NUMBERS = re.compile(r"\[\s*\d+(?:[\s,]+\d+)*[\s,]*\]")


def as_list(value: Any, place: str, name: str) -> Any:
    """The list that a field holds: a list, a text that is one, or one text or number, which is a
    list of one. None for a missing value: null, "", NaN. Any other value is unchanged.

    place, name: of the field, for messages. DataError for a text that looks like a list and cannot
    be read as one.
    """
    if value is None or value == "" or is_nan(value):
        return None
    if isinstance(value, (bool, int, float)):
        return [value]
    if not isinstance(value, str):
        return value
    items = parsed(value, place, name)
    return [value] if items is None else items


def doubt_of(value: Any, name: str, *, is_list: bool) -> str | None:
    """Why a text that is no list is probably not what it was meant to be, as left_out.note wants
    it: the word that a program writes for a missing value; where a list is wanted, one whose items
    lack quotes. None for any other value.

    name: of the field.
    """
    content = value.strip() if isinstance(value, str) else ""
    if content in _NO_VALUES:
        return f"texts {content!r} in {name!r} (read as texts; a missing value is empty or null)"
    return _IN_BRACKETS if is_list and _UNQUOTED.fullmatch(content) else None


def is_nan(value: Any) -> bool:
    """Whether a value is NaN, which pandas writes for a missing one."""
    return isinstance(value, float) and math.isnan(value)


def parsed(text: str, place: str, name: str) -> list[Any] | None:
    """The list that a text holds; None when the text is no list. DataError when it looks like one
    and cannot be read as one.
    """
    value = structure(text, place, name)
    if isinstance(value, list):
        return value
    if isinstance(value, dict) and _is_of_columns(value):
        problem = (
            "it is an object of lists. data.columns may lead to one of them, as 'answers.text'"
        )
        _refuse(text, place, name, problem)
    if not isinstance(value, dict) and _looks_like_a_list(text.strip()):
        _refuse(text, place, name, "its quotes, commas or brackets do not close as those of one")
    return None


def structure(text: str, place: str, name: str) -> list[Any] | dict[str, Any] | None:
    """The list or the object that a whole text holds, as JSON, Python or numpy write it; None for
    any other text. DataError when its items cannot be known.
    """
    try:
        return _structure(text)
    except _Unclear as problem:
        _refuse(text, place, name, str(problem))


def _structure(text: str) -> list[Any] | dict[str, Any] | None:
    content = text.strip()
    if not content.startswith(("[", "{", "(", "array(", "np.array(", "numpy.array(")):
        return None
    if content[0] in "[{":
        try:
            return json_value(content)
        except BadJson:  # it may still be a list as Python or numpy print it
            pass
    tokens = _Tokens(content)
    try:
        value = _value(tokens, 0)
        if tokens.next.kind != "end":
            return None
    except _NoStructure:
        return None
    if (half := half_of_pair(value)) is not None:
        raise _Unclear(half)
    return value if isinstance(value, (list, dict)) else None


def _refuse(text: str, place: str, name: str, problem: str) -> NoReturn:
    raise DataError(
        f"{place}: {name!r} is {preview(text)}, which looks like a list and cannot be read as one: "
        f'{problem}. Write it as JSON: ["one", "two"]; a text that begins so is a list of one.',
        place=place,
        field=name,
    )


def _is_of_columns(value: dict[str, Any]) -> bool:
    """Whether an object holds a list of objects by columns, as data sets and SQuAD's answers do:
    {"text": [...], "answer_start": [...]}; or TriviaQA's answer with its aliases.
    """
    lengths = [len(one) if isinstance(one, list) else -1 for one in value.values()]
    is_of_columns = len(lengths) > 1 and len({*lengths}) == 1 and lengths[0] >= 0
    return is_of_columns or isinstance(value.get("aliases"), list)


def _looks_like_a_list(content: str) -> bool:
    """Whether a text that is no list begins as only lists do, or begins and ends as one."""
    if _is_prose(content):
        return False
    if _SURE.match(content) or _NUMBERS.fullmatch(content):
        return True
    if content[:1] not in ("[", "("):
        return False
    closing = _CLOSING[content[0]]
    inner = content[1:].lstrip()
    opening = _QUOTED.match(inner)
    if opening is None:
        return False
    quote = opening[1]
    if content.endswith((f"'{closing}", f'"{closing}')) and content[0] == "[":
        return True
    if _NEXT_QUOTED.search(content) and (content[0] == "[" or closing not in content):
        return True
    if content[0] == "(":
        return False
    text = _TOKEN.match(inner)
    if text is None or text.lastgroup != "text":  # the first quote is never closed
        return closing not in content or quote not in "'\""
    return inner[text.end() :].lstrip()[:1] in (",", "]", "'", '"', "")


def _is_prose(content: str) -> bool:
    """Whether words stand behind the first bracket that closes ("['x'] is how"), or between whole
    texts within it ("['yes' or 'no']").
    """
    if content[:1] not in _CLOSING:
        return False
    depth, has_word, before = 0, False, _Token("mark", "", False)
    place = 0
    while match := _TOKEN.match(content, place):
        place = match.end()
        token = _Token(str(match.lastgroup), match[0], before.kind == "space")
        if token.kind == "mark":
            depth += (token.text in _CLOSING) - (token.text in _CLOSING.values())
        if depth == 0:
            rest = content[place:]
            is_behind = _WORD_BEHIND.match(rest) and not _LIST_BEHIND.search(rest)
            return bool(is_behind) or (has_word and not rest)
        if "word" in (token.kind, before.kind) and token.kind == "text":
            return False  # a quote is closed too early: ['it's', 'b']
        if token.kind == "word":
            if not token.is_apart or token.text in (*_CONSTANTS, "..."):
                return False
            has_word = True
        before = token
    return False


# The parts of a text
# --------------------------------------------------------------------------------------------------


class _NoStructure(Exception):
    """The text is no list."""


class _Unclear(Exception):
    """The text is a list, and what its items are cannot be known."""


class _Token(NamedTuple):
    kind: str  # text, number, word, mark, or end
    text: str
    is_apart: bool  # white space stands before it


class _Tokens:
    """The tokens of a text; `next` is the one that is to be read."""

    def __init__(self, content: str) -> None:
        self._tokens = _tokens(content)
        self.next = next(self._tokens)

    def take(self) -> _Token:
        token, self.next = self.next, next(self._tokens)
        return token

    def skip(self, mark: str) -> bool:
        """Whether the next token is this mark, which is then read."""
        is_there = self.next.kind == "mark" and self.next.text == mark
        if is_there:
            self.take()
        return is_there


def _tokens(content: str) -> Iterator[_Token]:
    place, is_apart = 0, False
    while place < len(content):
        match = _TOKEN.match(content, place)
        kind = match.lastgroup if match else None
        if match is None or kind is None:
            yield _Token("unknown", content[place], is_apart)
            break
        place = match.end()
        if kind != "space":
            yield _Token(kind, match[0], is_apart)
        is_apart = kind == "space"
    while True:
        yield _Token("end", "", is_apart)


def _value(tokens: _Tokens, depth: int) -> Any:
    if depth > _MAX_DEPTH:
        raise _NoStructure
    kind, text, _ = tokens.take()
    if kind == "text":
        return _without_quotes(text)
    if kind == "number":
        return _number(text)
    if kind == "word" and text in _CONSTANTS:
        return _CONSTANTS[text]
    if kind == "word" and text in _WRAPPERS and tokens.skip("("):
        return _list_in_call(tokens, depth)
    if kind == "word" and _SCALAR.fullmatch(text):
        return _scalar(text.partition(".")[2], tokens, depth)
    if kind == "mark" and text in ("[", "("):
        return _items(tokens, depth, closing=_CLOSING[text])
    if kind == "mark" and text == "{":
        return _pairs(tokens, depth)
    raise _NoStructure


def _items(tokens: _Tokens, depth: int, *, closing: str) -> list[Any]:
    """The items up to the closing bracket: all with commas between, or none with one."""
    items: list[Any] = []
    has_commas: bool | None = None
    while not tokens.skip(closing):
        if tokens.next.text == "..." and items:
            raise _Unclear("items are left out in its middle (...)")
        is_apart = tokens.next.is_apart
        if items:
            has_comma = tokens.skip(",")
            if has_comma and tokens.skip(closing):
                has_commas = True
                break
            if tokens.next.text == "...":
                raise _Unclear("items are left out in its middle (...)")
            if not has_comma and not is_apart:
                raise _NoStructure
            if has_commas not in (None, has_comma):
                raise _NoStructure
            has_commas = has_comma
        items.append(_value(tokens, depth + 1))
    if closing == ")" and (not has_commas or not all(isinstance(one, str) for one in items)):
        raise _NoStructure  # a text in parentheses, "(1, 2)" too
    return items


def _pairs(tokens: _Tokens, depth: int) -> dict[str, Any]:
    pairs: dict[str, Any] = {}
    while not tokens.skip("}"):
        if pairs and not tokens.skip(","):
            raise _NoStructure
        kind, name, _ = tokens.take()
        if kind != "text" or not tokens.skip(":"):
            raise _NoStructure
        key = _without_quotes(name)
        if key in pairs:
            raise _Unclear(f"its key {key!r} stands twice")
        pairs[key] = _value(tokens, depth + 1)
    return pairs


def _list_in_call(tokens: _Tokens, depth: int) -> Any:
    """The list in array([...], dtype=object) or list([...])."""
    value = _value(tokens, depth + 1)
    while not tokens.skip(")"):
        token = tokens.take()
        if token.kind not in ("word", "text") and token.text not in (",", "="):
            raise _NoStructure
    if not isinstance(value, list):
        raise _NoStructure
    return value


def _scalar(name: str, tokens: _Tokens, depth: int) -> Any:
    """The value in np.str_('a') or np.int64(3), as numpy 2 prints what stands in a list."""
    if name in _NUMPY_CONSTANTS:
        return _NUMPY_CONSTANTS[name]
    if not tokens.skip("("):
        raise _NoStructure
    value = _value(tokens, depth + 1)
    if not tokens.skip(")") or isinstance(value, (list, dict)):
        raise _NoStructure
    return value


def _number(text: str) -> int | float:
    digits = text.lstrip("+-")
    if digits.isdecimal():
        if len(digits) > 1 and digits.startswith("0"):
            raise _NoStructure  # 007 is an id, and no number
        if len(digits) > 1000:
            raise _Unclear(f"it holds a number of {len(digits)} digits")
        return int(text)
    return float(text)


def _without_quotes(text: str) -> str:
    if text[0] in "bB":
        raise _Unclear("it holds bytes (b'...'), which are no text")
    return _ESCAPE.sub(_character, text.lstrip("uU")[1:-1])


def _character(match: re.Match[str]) -> str:
    character, *codes, other = match.groups()
    if other is not None:
        raise _Unclear(f"'\\{other}' stands for no character")
    if character is not None:
        return _ESCAPED.get(character, character)
    return chr(int(next(code for code in codes if code is not None), 16))
