"""Faults in what keeps a run going or proves it: bad steps, the chain, saving behind the training."""

from tests.mutants.fault import Fault

OPENED = "trainer/files/opened.py"
BAD = "trainer/training/bad_steps.py"
LOOP = "trainer/training/loop.py"
FIT = "tests/numerics/test_fit.py -k 'left_out or leaves_steps or too_many'"
ROLLED = "tests/runs/test_bad_steps.py"
CHAIN = "trainer/telemetry/chain.py"
VERIFY = "tests/runs/test_verify.py"

SURVIVAL = "tests/unit/test_survival.py"
SURVIVE = "tests/runs/test_survive.py -m 'not long'"

FAULTS = [
    Fault(
        "trainer/runtime/beside.py",
        "            _give_way()",
        "            pass",
        why="writing and hashing a save slow the steps beside it",
        tests="tests/unit/test_beside.py",
    ),
    Fault(
        "trainer/survival/mirror.py",
        "step, world = max(whole)",
        "step, world = min(whole)",
        why="a run that lost a rank goes back a step more than it need",
        tests=SURVIVAL,
    ),
    Fault(
        "trainer/survival/mirror.py",
        "if len(ranks) == key[1]]",
        "if ranks]",
        why="a run goes on from a step that not every rank had kept",
        tests=SURVIVAL,
    ),
    Fault(
        "trainer/survival/mirror.py",
        'header["step"] > step',
        'header["step"] < step',
        why="steps of two generations may make one state",
        tests=SURVIVAL,
    ),
    Fault(
        "trainer/survival/agent.py",
        "self._break.generation < self._generation:  # a rank",
        "not self._break.generation:  # a rank",
        why="a rank that is lost while others recover ends the run",
        tests=SURVIVAL,
    ),
    Fault(
        "trainer/survival/agent.py",
        "if self._break is not None and self._break.generation == self._generation:",
        "if self._break is not None:",
        why="ranks that load for longer than others may take to let go are killed, again and again",
        tests=SURVIVAL,
    ),
    Fault(
        "trainer/survival/agent.py",
        "else not self._stragglers.step_s()",
        "else False",
        why="a run whose steps take minutes is killed as a hang",
        tests=SURVIVAL,
    ),
    Fault(
        "trainer/survival/agent.py",
        "if self._failed_imports >= MOST_IN_VAIN:",
        "if False:",
        why="processes that cannot import are started for ever",
        tests=SURVIVAL,
    ),
    Fault(
        "trainer/survival/stragglers.py",
        "share > SLOWER * others",
        "share < SLOWER * others",
        why="those who wait are named instead of the straggler",
        tests=SURVIVAL,
    ),
    Fault(
        "trainer/survival/agent.py",
        "is_new &= self._generation > self._break.generation and step > self._break.step",
        "is_new &= step > self._break.step",
        why="a step told late ends a recovery that has not begun, and the run fails",
        tests=SURVIVAL,
    ),
    Fault(
        "trainer/survival/agent.py",
        "all(batch % n == 0 for batch in batches)",
        "all(batch % n for batch in batches)",
        why="fewer ranks are so many that they cannot share the batch",
        tests=SURVIVAL,
    ),
    Fault(
        "trainer/training/optimizer_state.py",
        "return distributed.rank() * parameter.ds_tensor.numel()",
        "return 0",
        why="what ranks kept in memory at ZeRO-3 is put together wrongly",
        tests=f"{SURVIVE} -k spare_and",
    ),
    Fault(
        "trainer/training/optimizer_state.py",
        "return mapping.lp_fragment_address.start if mapping is not None else 0",
        "return 0",
        why="what ranks kept in memory at ZeRO-1 is put together wrongly",
        tests=f"{SURVIVE} -k without",
    ),
    Fault(
        BAD,
        "self.losses = [*self.losses, loss][-train.spike_window :]",
        "self.losses = [*self.losses, loss]",
        why="the window of losses grows, and after it has passed its length no spike is seen",
        tests=FIT,
    ),
    Fault(
        BAD,
        "if earlier > first",
        "if earlier > 0",
        why="bad steps of long ago stop the run",
        tests=FIT,
    ),
    Fault(
        "trainer/training/session.py",
        '"bad": self.bad.state()',
        '"bad": {}',
        why="a resumed run has forgotten the losses that a spike is told by",
        tests=FIT,
    ),
    Fault(
        "trainer/runtime/deepspeed_optimizers.py",
        '"_overflow_check_and_loss_scale_update": refuse,',
        "",
        why="at stage 3 the update of a spike is made all the same",
        tests=FIT,
    ),
    Fault(
        LOOP,
        "if number in session.rolled_back:",
        "if number - 1 in session.rolled_back:",
        why="a rollback leaves out the window behind the bad one",
        tests=ROLLED,
    ),
    Fault(
        CHAIN,
        "        if (seal or previous) and _seal(content, previous) != seal:",
        "        if seal and _seal(content, seal) == seal:",
        why="a line whose bits were changed is taken as it is",
        tests=VERIFY,
    ),
    Fault(
        CHAIN,
        "            return cls(links[distributed.rank()])",
        "            return cls(links[0][1:])",
        why="the chain of a resumed run is another one",
        tests=VERIFY,
    ),
    Fault(
        "trainer/training/run_plan.py",
        "    return has_ended and has_export",
        "    return has_ended",
        why="a run that lost its weights is taken for finished",
        tests=VERIFY,
    ),
    Fault(
        "trainer/launch/run_folder.py",
        "    if problem and _is_resolved(plan):",
        "    if problem:",
        why="a torn dictionary is made again where nothing says that it was this one",
        tests="tests/runs/test_unclear_input.py -k torn",
    ),
    Fault(
        OPENED,
        "return [about.st_size, about.st_mtime_ns, about.st_ctime_ns, about.st_ino]",
        "return [about.st_size, about.st_mtime_ns, about.st_mtime_ns, about.st_ino]",
        why="a file of other content whose time was put back is taken for the old one",
        tests="tests/unit/test_remembered.py",
    ),
    Fault(
        OPENED,
        "or _sample(path, facts[0]) != facts[4]",
        "or False",
        why="what a file system does not tell is not noticed",
        tests="tests/unit/test_remembered.py",
    ),
    Fault(
        OPENED,
        "            outer.is_whole &= noted.is_whole",
        "            pass",
        why="rows of Arrow's files that were read on the way are remembered for ever",
        tests="tests/unit/test_remembered.py",
    ),
    Fault(
        "trainer/runtime/distributed.py",
        'if store.add(f"lathe/met/{other}", 0) < own',
        'if store.add(f"lathe/met/{other}", 0) < own - 1',
        why="ranks do not wait for one that still loads",
        tests="tests/unit/test_distributed.py",
    ),
    Fault(
        "trainer/files/saved_tensors.py",
        "max(start - place.start, 0) : stop - place.start",
        "start - place.start : stop - place.start",
        why="a rank of another world reads moments of other weights",
        tests="tests/numerics/test_engine.py -k pieces",
    ),
    Fault(
        "trainer/training/engine.py",
        "        self.state_copy.wait()\n        with ExitStack()",
        "        with ExitStack()",
        why="an update runs into the copy of the state before it: a checkpoint of two steps",
        tests="tests/numerics/test_engine.py -k pieces",
    ),
    Fault(
        "trainer/proof/place.py",
        "is_sound=not any(distributed.gather(has_lock))",
        "is_sound=True",
        why="a disk whose locks exclude nobody is called sound",
        tests="tests/runs/test_doctor.py -k disk_whose",
    ),
    Fault(
        "trainer/launch/preflight.py",
        "return bool(checkpoint.candidates(plan.checkpoints))",
        "return plan.checkpoints.exists()",
        why="a run killed in its first save begins anew with other random numbers",
        tests="tests/runs/test_preflight.py -k first_save",
    ),
    Fault(
        "trainer/training/checkpoint.py",
        "if then and then.get(key) != now.get(key)",
        "if False",
        why="a run goes on with other versions or kernels than it was saved by, and nothing is said",
        tests="tests/runs/test_verify.py -k other_ranks",
    ),
]
