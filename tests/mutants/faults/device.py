"""Faults that only a GPU would show: waits for it, and copies to it."""

from tests.mutants.fault import Fault

WAITS = "tests/runs/test_device_waits.py -m 'not long'"
OF_A_STEP = f"{WAITS} -k 'causal_lm or more_micro or saves_a_wait'"

FAULTS = [
    Fault(
        "trainer/runtime/batch.py",
        "for place in (index, index + 1)",
        "for place in (index,)",
        why="a micro-batch is copied only when the device already waits for it",
        tests=f"{WAITS} -k window",
    ),
    Fault(
        "trainer/runtime/batch.py",
        "with torch.cuda.stream(_Copy._stream):",
        "with torch.cuda.stream(torch.cuda.current_stream()):",
        why="a copy stands in the way of what is computed",
        tests=OF_A_STEP,
    ),
    Fault(
        "trainer/data/order.py",
        "batches = [distributed.pin_batch(batch) for batch in batches]",
        "batches = list(batches)",
        why="every tensor of a batch is waited for",
        tests=OF_A_STEP,
    ),
    Fault(
        "trainer/config/deepspeed_config/engine.py",
        'setdefault("throughput", {}).setdefault("enabled", False)',
        'setdefault("throughput", {}).setdefault("enabled", True)',
        why="DeepSpeed drains the device before every forward, for a number that nobody reads",
        tests=OF_A_STEP,
    ),
    Fault(
        "trainer/runtime/deepspeed_optimizers.py",
        "scale = torch.clamp(clip, min=1.0) * optimizer.loss_scale",
        "scale = clip * optimizer.loss_scale",
        why="on a GPU a small gradient is blown up to the clipping norm",
        tests=OF_A_STEP,
    ),
    Fault(
        "trainer/models/masks.py",
        "is_on_device = isinstance(tensor, Tensor) and tensor.device != _CPU",
        "is_on_device = False",
        why="the host looks into every mask on the device",
        tests="tests/unit/test_masks.py",
    ),
    Fault(
        "trainer/launch/memory.py",
        "weight.register_hook(lambda gradient: gradient.new_zeros(()).expand_as(gradient))",
        "weight.register_hook(lambda gradient: gradient)",
        why="a rehearsal needs the whole model's gradient, and refuses runs that fit",
        tests="tests/unit/test_device_defaults.py -k rehearsal",
    ),
    Fault(
        "trainer/runtime/device_defaults.py",
        "torch.backends.cuda.enable_cudnn_sdp(False)",
        "torch.backends.cuda.enable_cudnn_sdp(True)",
        why="cuDNN plans 30 ms for every shape that it has not met",
        tests="tests/unit/test_device_defaults.py -k cudnn",
    ),
    Fault(
        "trainer/models/fused.py",
        "        block.__class__ = _compiled_kind(type(block))",
        "        block.forward = _compile(block.forward)",
        why="blocks that transformers computes again in the backward pass are not compiled at all",
        tests="tests/numerics/test_compiled.py -k 'all_lengths and retriever'",
    ),
    Fault(
        "trainer/models/fused.py",
        "torch.compile(function, dynamic=True, backend=BACKEND)",
        "torch.compile(function, dynamic=False, backend=BACKEND)",
        why="blocks are compiled anew for every length",
        tests="tests/numerics/test_compiled.py -m 'not long' -k lengths",
    ),
    Fault(
        "trainer/config/deepspeed_config/stages.py",
        "if train.compile and stage >= 3:",
        "if train.compile and stage >= 4:",
        why="blocks are compiled at ZeRO-3, where nothing is left to fuse",
        tests="tests/numerics/test_compiled.py -m 'not long' -k refuses",
    ),
    Fault(
        "trainer/runtime/deepspeed_optimizers.py",
        'vars(parameter)["ds_persist"] = True',
        'vars(parameter)["ds_persist"] = False',
        why="frozen weights that were to stay are gathered for every micro-batch",
        tests="tests/runs/test_communication.py -k keeps",
    ),
    Fault(
        "trainer/config/deepspeed_config/stages.py",
        "if size < 1 or world % size:",
        "if size < 1:",
        why="ranks that do not fill a node divide weights among ranks that are not there",
        tests="tests/unit/test_deepspeed_config.py -k secondary",
    ),
    Fault(
        "trainer/models/processor/products.py",
        "and all(one.dtype == left.dtype for one in tensors)",
        "and True",
        why="a product of numbers of two dtypes comes out where torch refuses it",
        tests="tests/unit/test_wide_products.py",
    ),
    Fault(
        "trainer/models/processor/products.py",
        "widened.add(dtype)",
        "pass",
        why="a processor without instructions for bf16 takes up to 60 times as long for a product",
        tests="tests/unit/test_wide_products.py",
    ),
    Fault(
        "trainer/plan/memory/fake_device.py",
        'if name and _where(args[0]).type == "cpu" and products.takes(name, args, named):',
        "if False:",
        why="a plan of a processor counts no copies in fp32 of numbers of 16 bits",
        tests="tests/unit/test_wide_products.py -k plan",
    ),
    Fault(
        "trainer/runtime/deepspeed_optimizers.py",
        "compiler.compile = lambda: functools.partial(_compiled_when_called, stock)",
        "pass",
        why="every start of a run imports torch's compiler, 3 s, for a Muon that nobody uses",
        tests="tests/unit/test_deepspeed_imports.py",
    ),
]
