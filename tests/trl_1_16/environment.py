"""Makes the environment in which TRL runs, once:

    python -m tests.trl_1_16.environment

It prints its interpreter. TRL asks for nothing that is not in ours, and is made anew when another
TRL is asked for. 4 MB, seconds.
"""

from __future__ import annotations

from tests.environments import Layer

VERSION = "1.16.0"
TRL = Layer(f"trl-{VERSION}", (f"trl=={VERSION}",), "LATHE_TRL")

if __name__ == "__main__":
    print(TRL.python())
