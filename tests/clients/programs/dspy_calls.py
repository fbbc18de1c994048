"""DSPy: a program's answers, and BootstrapFinetune, which tunes the program's own model by them."""

import dspy
from calls import CHAT, URL, tried
from dspy.utils import DummyLM

HOW = {"api_base": URL, "api_key": "none", "temperature": 0, "max_tokens": 64, "cache": False}
model = dspy.LM(f"openai/{CHAT}", **HOW)
COLOURS = ["red", "blue", "green", "black"]
EXAMPLES = [
    dspy.Example(question=f"What is {one}?", answer=one).with_inputs("question")
    for one in COLOURS * 3
]


def chat():
    assert model("What colour is red 1?")


def several():
    how = {"n": 2, "temperature": 1.0, "top_p": 0.9}
    assert len(model("What colour is red 1?", **how)) == 2


def tune():
    student = dspy.Predict("question -> answer")
    student.lm = model
    teacher = dspy.Predict("question -> answer")
    teacher.lm = DummyLM([{"answer": one.answer} for one in EXAMPLES])
    optimiser = dspy.BootstrapFinetune(num_threads=1, train_kwargs={"n_epochs": 1})
    tuned = optimiser.compile(student, trainset=EXAMPLES, teacher=teacher)
    assert tuned.lm.model.startswith("ft:")
    tuned.lm.model = f"openai/{tuned.lm.model}"  # LiteLLM knows models of other names by it
    assert tuned.lm("What is red?")


dspy.settings.experimental = True
tried("chat", chat)
tried("chat: n, seed, top_p, penalties, stop", several)
tried("fine-tuning, to an answer of the model", tune)
