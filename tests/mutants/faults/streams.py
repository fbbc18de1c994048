"""Faults in rows that are encoded while they are trained on."""

from tests.mutants.fault import Fault

UNIT = "tests/unit/test_stream.py"
RUNS = "tests/runs/test_streams.py -k grew"

FAULTS = [
    Fault(
        "trainer/data/stream/lines.py",
        "rows[line] = bool(block[starts[line] : stop].strip())",
        "rows[line] = True",
        why="blank lines count as rows, so the order is another one than without a stream",
        tests=UNIT,
    ),
    Fault(
        "trainer/data/stream/files.py",
        "if Stamp.of(self._path) != self._stamp:",
        "if False:",
        why="rows of a file that changed meanwhile are cut at the old places",
        tests=UNIT,
    ),
    Fault(
        "trainer/data/stream/row_index.py",
        "positions = np.asarray(numbers, np.int64) + self._rows.start",
        "positions = np.asarray(numbers, np.int64)",
        why="a part of the rows is another part in a stream",
        tests=UNIT,
    ),
    Fault(
        "trainer/data/stream/encoding_ahead.py",
        "order = [*range(start, layout.num_chunks), *range(start)]",
        "order = [*range(layout.num_chunks)]",
        why="a resumed run without its cache waits for all rows that it has trained on",
        tests=UNIT,
    ),
    Fault(
        "trainer/data/stream/encoding_ahead.py",
        "missing = [chunk for chunk in order if chunk not in finished]",
        "missing = order[:1] + order[2:]",
        why="a run waits for ever for a chunk that nobody makes",
        tests=f"{UNIT} -k whole_store",
    ),
    Fault(
        "trainer/data/stream/encoding_ahead.py",
        "if len(rows) > 1:",
        "if False:",
        why="the ends of long texts are left out in silence",
        tests=UNIT,
    ),
    Fault(
        "trainer/data/stream/encoding_ahead.py",
        "labels = first.lost_labels",
        "labels = (0, 1)",
        why="train.max_lost_labels does not hold for texts that a stream cuts",
        tests=UNIT,
    ),
    Fault(
        "trainer/data/stream/store.py",
        "raise_failure(self.folder)  # of any chunk",
        "pass  # of any chunk",
        why="a run trains for hours towards a row that is known to be bad",
        tests=f"{UNIT} -k soon",
    ),
    Fault(
        "trainer/data/stream/store.py",
        "forget_failure(self.folder)",
        "pass",
        why="a run is refused for a row that was mended",
        tests=UNIT,
    ),
    Fault(
        "trainer/statistics/met_rows.py",
        "if lost > self.most_lost * of:",
        "if False:",
        why="a stream learns texts without their ends",
        tests=UNIT,
    ),
    Fault(
        "trainer/launch/run_folder.py",
        'return "" if None in (then, now) or then == now else',
        'return "" if True else',
        why="nobody is told that a source grew",
        tests=RUNS,
    ),
]
