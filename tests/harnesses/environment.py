"""Makes the environment in which lm-eval and MTEB run, once:

    python -m tests.harnesses.environment

It prints its interpreter. All of it that is not in ours is listed in constraints.txt. 400 MB, half
a minute.
"""

from __future__ import annotations

from pathlib import Path

from tests.environments import Layer

CONSTRAINTS = Path(__file__).with_name("constraints.txt")
HARNESSES = Layer("harnesses", CONSTRAINTS.read_text().split(), "LATHE_HARNESSES")

if __name__ == "__main__":
    print(HARNESSES.python())
