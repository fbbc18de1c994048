"""Faults in the functions for Python."""

from tests.mutants.fault import Fault

UNIT = "tests/unit/test_functions.py"
RUNS = "tests/runs/test_api.py"
TWO_RUNS = f"{RUNS} -k two_runs"

FAULTS = [
    Fault(
        "trainer/__init__.py",
        "if not (name in _MODULES and isinstance(value, ModuleType)):",
        "if True:",
        why="after the first plan, `from trainer import plan` is a module",
        tests=f"{UNIT} -k names",
    ),
    Fault(
        "trainer/api/process_state.py",
        "stack.callback(rng.restore, rng.capture())",
        "rng.capture()",
        why="a notebook draws other numbers after a run than before it",
        tests=TWO_RUNS,
    ),
    Fault(
        "trainer/api/process_state.py",
        "stack.callback(torch.set_default_dtype, torch.get_default_dtype())",
        "pass",
        why="a notebook in fp64 goes on in fp32 after a run",
        tests=TWO_RUNS,
    ),
    Fault(
        "trainer/api/process_state.py",
        "del os.environ[name]",
        "pass",
        why="what a notebook starts after a run believes to be a rank",
        tests=TWO_RUNS,
    ),
    Fault(
        "trainer/api/training.py",
        "raise KeyboardInterrupt(text)",
        "return",
        why="after an interrupt a notebook goes on with the next cell",
        tests=f"{RUNS} -k interrupt_saves",
    ),
    Fault(
        "trainer/api/run.py",
        'if line.endswith("\\n"):',
        "if True:",
        why="a run that is training cannot be looked at",
        tests=f"{UNIT} -k tells_its_numbers",
    ),
    Fault(
        "trainer/launch/run_folder.py",
        "began_at=options.began_at,",
        "began_at=None,",
        why="a run in a notebook says that it took hours to start",
        tests=TWO_RUNS,
    ),
]
