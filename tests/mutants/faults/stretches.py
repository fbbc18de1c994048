"""Faults of ranks that share the tokens of a row."""

from __future__ import annotations

from tests.mutants.fault import Fault

_STRETCH, _TESTS = "trainer/models/stretches/stretch.py", "tests/unit/test_sharing.py"

FAULTS = [
    Fault(
        _STRETCH,
        "is_here = (scored >= start) & (scored < start + length)",
        "is_here = (scored >= start) & (scored < start + length - 1)",
        why="the last token of every stretch learns nothing",
        tests=f"{_TESTS} -k every_target_once",
    ),
    Fault(
        "trainer/models/stretches/exchange.py",
        "return ranks // math.gcd(key_value_heads, ranks)",
        "return max(1, ranks // key_value_heads)",
        why="a base with 6 key-value heads ends on 4 ranks",
        tests=f"{_TESTS} -k repeated",
    ),
    Fault(
        "trainer/data/order.py",
        "return self.rank // self.sharing",
        "return self.rank % self.groups",
        why="ranks that share a row read stretches of different rows",
        tests="tests/unit/test_order.py -k neighbours",
    ),
    Fault(
        "trainer/config/deepspeed_config/engine.py",
        "return total // (micro * accumulation) * sequence_ranks(config)",
        "return total // (micro * accumulation)",
        why="DeepSpeed is told half of its ranks, and memory is planned for half of them",
        tests=f"{_TESTS} -k data_parallel_ranks",
    ),
    Fault(
        "trainer/data/mixed/by_source.py",
        'scored_N = scored_N + batch["before"]',
        "pass",
        why="labels of later stretches are told as those of the first source",
        tests=f"{_TESTS} -k source_of_its_row",
    ),
]
