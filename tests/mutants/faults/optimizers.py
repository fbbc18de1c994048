"""Faults in optimizers, in rates of groups of weights, and in what stands still."""

from tests.mutants.fault import Fault

ENGINE = "tests/numerics/test_engine.py"
RATES = "tests/unit/test_rates.py"
EVERY = "tests/numerics/test_optimizers.py"
STANDS = f"{EVERY} -k gets_no_update"
STEPS = f"{EVERY} -k 'steps_are_those_of_plain_torch and {{}}'"
MUON = "tests/numerics/test_muon.py"
EIGHT_BITS = "tests/numerics/test_adamw8bit.py"
PLACES = "trainer/models/optimizers/rates.py"
STANDSTILL = "trainer/models/optimizers/standstill.py"
STATE = "trainer/training/optimizer_state.py"

FAULTS = [
    Fault(
        "trainer/models/optimizers/__init__.py",
        "beta2_decay=BETA2_DECAY",
        "beta2_decay=-0.5",
        why="Adafactor forgets squares at another speed than published",
        tests="tests/numerics/test_adafactor.py",
    ),
    Fault(
        STATE,
        'int(scalars.get(f"{STEP}|{name}", scalars[STEP]))',
        "0",
        why="a resumed run corrects the bias of its moments as if it had just begun",
        tests=ENGINE,
    ),
    Fault(
        STATE,
        'int(scalars.get(f"{STEP}|{name}", scalars[STEP]))',
        "int(scalars[STEP])",
        why="weights that stood still are resumed with the count of steps of all others",
        tests=f"{EVERY} -k 'continues_bit_for_bit and adamw and fp32'",
    ),
    Fault(
        STATE,
        'group["lr"] = group["weight_decay"] = 0.0',
        'group["lr"] = 0.0',
        why="empty moments of SGD begin with its decay",
        tests=f"{EVERY} -k 'still_for_sgd'",
    ),
    Fault(
        PLACES,
        "share = group.lr / optim.lr",
        "share *= group.lr / optim.lr",
        why="a rate of its own is scaled by layer_decay all the same",
        tests=f"{EVERY} -k layer_decay",
    ),
    Fault(
        PLACES,
        'heights[name] = stacks[".".join(parts[: outer[0]])] - int(parts[outer[0]])',
        "heights[name] = int(parts[outer[0]])",
        why="layer_decay falls from the bottom to the top",
        tests=RATES,
    ),
    Fault(
        PLACES,
        "share *= plus",
        "share /= plus",
        why="LoRA+ slows the second matrix down",
        tests=RATES,
    ),
    Fault(
        "trainer/training/engine.py",
        'group["lr"] = lr * group["share"]',
        'group["lr"] = lr',
        why="every group of rates has the same rate",
        tests=f"{EVERY} -k layer_decay",
    ),
    Fault(
        STANDSTILL,
        "tensor.grad = None",
        "pass",
        why="what stands still decays, and its moments do",
        tests=STANDS,
    ),
    Fault(
        STANDSTILL,
        "weight.requires_grad_(not freeze.holds(step))",
        "weight.requires_grad_(True)",
        why="gradients of what stands still count in the norm that clips",
        tests=STANDS,
    ),
    Fault(
        "trainer/models/optimizers/lion.py",
        "average.lerp_(gradient, 1 - second)",
        "average.lerp_(gradient, 1 - first)",
        why="Lion's momentum forgets as fast as its step",
        tests=STEPS.format("lion"),
    ),
    Fault(
        "trainer/models/optimizers/muon.py",
        "matrix = _whole(update, piece, shape) if is_cut else _part(update, piece)",
        "matrix = _part(update, piece) if piece and piece.count == shape.numel() else None",
        why="matrices that are cut between ranks stand still",
        tests=STEPS.format("muon"),
    ),
    Fault(
        "trainer/models/optimizers/muon.py",
        "RMS_OF_ADAMW * math.sqrt(max(shape))",
        "RMS_OF_ADAMW * math.sqrt(min(shape))",
        why="steps of long matrices are smaller than AdamW's",
        tests=MUON,
    ),
    Fault(
        "trainer/models/optimizers/adamw8bit.py",
        "absmax.copy_(highest_N.clamp(min=0.0))",
        "pass",
        why="a resumed run forgets the scale of its moments",
        tests=f"{EIGHT_BITS} -k 'go_on_bit_for_bit'",
    ),
    Fault(
        "trainer/config/optimizer/freeze.py",
        "self.since < step and (self.until is None or step <= self.until)",
        "self.since <= step and (self.until is None or step < self.until)",
        why="weights thaw a step too early",
        tests=RATES,
    ),
]
