"""Faults in layers that keep less for the backward pass."""

from tests.mutants.fault import Fault

LEAN = "tests/numerics/test_lean.py -m 'not long'"
ADAPTER = "trainer/models/lean/adapter.py"
DROPOUT = "trainer/models/lean/dropout.py"
GATED = "trainer/models/lean/gated.py"
LIGER = "trainer/models/lean/liger.py"
OF_LIGER = "tests/numerics/test_liger.py -m 'not long'"

FAULTS = [
    Fault(
        DROPOUT,
        "_set_state(self._device, self._state)",
        "pass",
        why="on a GPU gradients of adapters belong to another mask than their outputs",
        tests=f"{LEAN} -k draws_fast",
    ),
    Fault(
        DROPOUT,
        "_set_state(self._device, now)",
        "pass",
        why="on a GPU the next micro-batch draws the masks of the last one",
        tests=f"{LEAN} -k draws_fast",
    ),
    Fault(
        ADAPTER,
        "ctx.remake(*sources)",
        "sources[0]",
        why="adapters of down_proj learn from the gate instead of their input",
        tests=f"{LEAN} -k 'every_family and llama'",
    ),
    Fault(
        ADAPTER,
        "low.dtype == torch.float16 or ",
        "",
        why="fp16 loses bits of small numbers that peft keeps",
        tests=f"{LEAN} -k power_of_two",
    ),
    Fault(
        ADAPTER,
        " or has_bias",
        "",
        why="the bias of an adapter is added without its scale",
        tests=f"{LEAN} -k 'bias_of_an_adapter'",
    ),
    Fault(
        ADAPTER,
        " and not module.lora_variant",
        "",
        why="a DoRA layer would lose its magnitudes",
        tests=f"{LEAN} -k dora",
    ),
    Fault(
        ADAPTER,
        "layer.disable_adapters or",
        "",
        why="the model that preferences are compared with has adapters",
        tests=f"{LEAN} -k dora",
    ),
    Fault(
        GATED,
        "of_up = gradient * opened.detach()",
        "of_up = gradient * gate",
        why="up_proj trains as if there were no activation",
        tests=f"{LEAN} -k gated",
    ),
    Fault(
        GATED,
        "if ctx.is_dropped:",
        "if False:",
        why="what a T5's dropout took away gets a gradient",
        tests=f"{LEAN} -k 'gated and mt5'",
    ),
    Fault(
        "trainer/plan/memory/measure.py",
        "parent.parent.parent.parent",
        "parent.parent.parent",
        why="a new version shows the memory that the old one needed",
        tests="tests/unit/test_memory_parts.py -k measured_again",
    ),
    Fault(
        LIGER,
        "is_same = q.dtype == k.dtype and (rounds_back or cos.dtype == q.dtype)",
        "is_same = True",
        why="on a GPU a Llama that turns in fp32 is rounded to bf16 without a word",
        tests=f"{OF_LIGER} -k rounded_back",
    ),
    Fault(
        LIGER,
        "return _PRODUCTS.get(type(act).__name__) if is_whole else None",
        "return _PRODUCTS.get(type(act).__name__)",
        why="on a GPU the library reads halves of one tensor of Phi-3 as two tensors",
        tests=f"{OF_LIGER} -k does_not_know",
    ),
    Fault(
        LIGER,
        'if torch.compiler.is_compiling() or x.device.type in ("cpu", "meta"):',
        "if torch.compiler.is_compiling():",
        why="a processor asks for kernels of a GPU",
        tests=f"{OF_LIGER} -k only_a_gpu",
    ),
    Fault(
        GATED,
        "ctx.is_spent = True",
        "pass",
        why="a second backward pass reads gradients for activations",
        tests=f"{OF_LIGER} -k second_backward",
    ),
]
