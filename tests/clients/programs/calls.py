"""What the programs have in common, which run each in its client's own environment: a call is tried,
and its result is printed as one line of JSON.
"""

import json
import sys
import time

# What the test has written: the server's address, its models, and a file of rows.
WORLD = json.loads(sys.argv[1])
URL, CHAT, VECTORS = WORLD["url"], WORLD["chat"], WORLD["vectors"]
MODEL, ROWS = WORLD["model"], WORLD["rows"]
QUESTION = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What colour is red 1?"},
]
SCHEMA = {
    "type": "object",
    "properties": {"colour": {"enum": ["red", "blue"]}, "sure": {"type": "boolean"}},
    "required": ["colour", "sure"],
    "additionalProperties": False,
}
LOOK_UP = {
    "name": "look_up",
    "description": "Looks up a colour.",
    "parameters": {
        "type": "object",
        "properties": {"name": {"enum": ["red", "blue"]}},
        "required": ["name"],
        "additionalProperties": False,
    },
}
TOOLS = [{"type": "function", "function": LOOK_UP}]


def tried(name, call):
    """Try a call, and say how it ended. AssertionError: what came is not what was asked for."""
    try:
        call()
        result = "works"
    except Exception as error:
        status = getattr(error, "status_code", None)
        is_refused = isinstance(status, int) and 400 <= status < 500
        result = f"{'refused' if is_refused else 'fails'}: {type(error).__name__}: {error}"
    print(json.dumps({"call": name, "result": result}), flush=True)


def until(look, is_so, within_s=300):
    """What `look` gives, as soon as it is so."""
    end = time.monotonic() + within_s
    while True:
        value = look()
        if is_so(value):
            return value
        assert time.monotonic() < end, f"still {value}"
        time.sleep(0.5)
