"""CPU seconds until the first step is done, against the Hugging Face Trainer with the same work.

    python benchmarks/start.py --tokenizer ../shared/data/tokenizers/starcoder [--rows 25000] \
        [--kinds texts chat] [--rounds 3] [--parts]

Both sides read the same JSON lines, tokenise every row, hash every row, write the tokens to the
disk and take one step of a tiny Llama, each in a process of its own with an empty cache, in turns.
The opponent is lean: `load_dataset("json")`, `map(batched=True)` with a fast tokenizer, sha256 over
the rows, `Trainer` with one step. Of conversations both learn the answers alone, in ChatML: the
opponent writes it without a template, and encodes what is asked and what is answered by a batched
call each. --parts: only how long rows take to become tokens, against the same calls for a thousand
rows at once, in this process.
"""

from __future__ import annotations

import argparse
import inspect
import json
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # runs from a checkout that is not installed

from trainer.data import stdlib_docs  # noqa: E402

MAX_TOKENS = 512
BASE = {
    "config": {
        "model_type": "llama",
        "vocab_size": 49_152,  # of starcoder's tokenizer; larger than most
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
}
_DATA = {
    "texts": {"source": "files", "loss_on": "all"},
    "chat": {"source": "chat", "chat_template": "chatml"},
}


def pairs(conversations: list[Any]) -> tuple[list[str], list[str]]:
    """What is asked and what is answered, in ChatML, of conversations of two turns."""
    asked, told = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n", "{}<|im_end|>\n"
    questions = [asked.format(turns[0]["content"]) for turns in conversations]
    return questions, [told.format(turns[1]["content"]) for turns in conversations]


OPPONENT = """
import hashlib, json, sys
from datasets import load_dataset
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments
from transformers import DataCollatorForLanguageModeling, DataCollatorForSeq2Seq
folder, source, kind, limit, config = sys.argv[1:]
limit = int(limit)
tokenizer = AutoTokenizer.from_pretrained(source)
tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
files = f"{folder}/train.jsonl"
rows = load_dataset("json", data_files=files, split="train", cache_dir=f"{folder}/hf")
def hashes(texts):
    return [hashlib.sha256(one.encode()).hexdigest() for one in texts]
def encode(batch):
    texts = batch["text"]
    ids = tokenizer(texts, add_special_tokens=False, truncation=True, max_length=limit)["input_ids"]
    return {"input_ids": ids, "hash": hashes(texts)}
def encode_chat(batch):
    asked, told = pairs(batch["messages"])
    parts = [tokenizer(side, add_special_tokens=False)["input_ids"] for side in (asked, told)]
    ids = [(one + other)[:limit] for one, other in zip(*parts)]
    labels = [([-100] * len(one) + other)[:limit] for one, other in zip(*parts)]
    texts = [one + other for one, other in zip(asked, told)]
    return {"input_ids": ids, "labels": labels, "hash": hashes(texts)}
is_chat = kind == "chat"
how = dict(batched=True, remove_columns=rows.column_names)
encoded = rows.map(encode_chat if is_chat else encode, **how).remove_columns("hash")
own = json.loads(config)
own.pop("model_type")
model = LlamaForCausalLM(LlamaConfig(**own))
arguments = TrainingArguments(f"{folder}/out", max_steps=1, per_device_train_batch_size=8,
    report_to=[], save_strategy="no", use_cpu=True, disable_tqdm=True)
of_texts, of_pairs = DataCollatorForLanguageModeling(tokenizer, mlm=False), DataCollatorForSeq2Seq
collate = of_pairs(tokenizer) if is_chat else of_texts
Trainer(model, arguments, train_dataset=encoded, data_collator=collate).train()
"""


def write_rows(folder: Path, kind: str, count: int) -> None:
    """Rows of the standard library's own words: texts of 30 to 90, or a question and an answer."""
    words = " ".join(row["text"] for row in stdlib_docs.texts("train")).split()
    draw = random.Random(0)

    def text(num_words: int) -> str:
        start = draw.randrange(len(words) - num_words)
        return " ".join(words[start : start + num_words])

    for split, rows in (("train", count), ("valid", 8)):
        with (folder / f"{split}.jsonl").open("w", encoding="utf-8") as file:
            for _ in range(rows):
                row: dict[str, Any] = {"text": text(draw.randrange(30, 90))}
                if kind == "chat":
                    asked, told = text(20), text(draw.randrange(20, 60))
                    turns = [{"role": "user", "content": asked}]
                    row = {"messages": [*turns, {"role": "assistant", "content": told}]}
                file.write(json.dumps(row) + "\n")


def experiment(kind: str, tokenizer: str) -> dict[str, Any]:
    """A language model of one step on these rows."""
    return {
        "task": "causal_lm",
        "base": BASE,
        "tokenizer": tokenizer,
        "data": {"max_tokens": MAX_TOKENS, **_DATA[kind]},
        "train": {"steps": 1, "global_batch": 8, "micro_batch": 8},
        "optim": {"lr": 1e-3},
    }


def ours(folder: Path, kind: str, tokenizer: str, place: Path) -> list[str]:
    """The command line of our run."""
    groups = place / "groups.py"
    groups.write_text(f"EXP_GROUPS = {{'start': [{experiment(kind, tokenizer)!r}]}}\n")
    words = [sys.executable, str(ROOT / "trainval.py"), "-e", "start", "--exp_configs", str(groups)]
    words += ["-sb", str(place / "runs"), "--data_path", str(folder)]
    return [*words, "--cache_dir", str(place / "cache")]


def cpu_s(argv: list[str]) -> float:
    """CPU seconds of a process and of all that it starts and waits for."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "WANDB_MODE": "disabled"}
    environment |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(argv, cwd=ROOT, env=environment, capture_output=True, text=True)
    if done.returncode:
        sys.exit(done.stdout[-2000:] + done.stderr[-4000:])
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def tell_start(kind: str, folder: Path, tokenizer: str, rounds: int) -> None:
    """Print the CPU seconds of both sides, in turns."""
    config = json.dumps(BASE["config"])
    program = "from typing import Any\n" + inspect.getsource(pairs) + OPPONENT
    own: list[float] = []
    theirs: list[float] = []
    for number in range(rounds):
        with tempfile.TemporaryDirectory(dir=folder) as name:
            own.append(cpu_s(ours(folder, kind, tokenizer, Path(name))))
        with tempfile.TemporaryDirectory(dir=folder) as name:
            (Path(name) / "train.jsonl").symlink_to(folder / "train.jsonl")
            arguments = [name, tokenizer, kind, str(MAX_TOKENS), config]
            theirs.append(cpu_s([sys.executable, "-c", program, *arguments]))
        ratio = own[-1] / theirs[-1]
        print(f"  {number + 1}: ours {own[-1]:.1f}, Trainer {theirs[-1]:.1f}, {ratio:.2f}")
    print(f"{kind}: least {min(own):.1f} / {min(theirs):.1f} CPU s = {min(own) / min(theirs):.2f}")


def tell_parts(kind: str, folder: Path, tokenizer: str, rounds: int) -> None:
    """Print how long the rows take to become tokens, against batched calls of the tokenizer."""
    from trainer import tasks
    from trainer.protocol.task import Places

    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    values = experiment(kind, tokenizer)
    ratios: list[float] = []
    for _ in range(rounds):
        task: Any = tasks.load(tasks.parse(values), Places(folder, folder / "c", folder))
        rows = list(task.rows("train"))
        began = time.process_time()
        for start in range(0, len(rows), 64):
            task.encode_rows(rows[start : start + 64])
        encoded = time.process_time()
        for start in range(0, len(rows), 1000):
            some = rows[start : start + 1000]
            if kind == "texts":
                sides = [[row["text"] for row in some]]
            else:
                sides = pairs([row["messages"] for row in some])
            for side in sides:
                task.tokenizer(side, add_special_tokens=False)
        ratios.append((encoded - began) / (time.process_time() - encoded))
    print(f"{kind}: tokens {', '.join(f'{one:.2f}' for one in sorted(ratios))} of batched calls")


def main() -> None:
    """Print the figures."""
    flags = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    flags.add_argument("--tokenizer", required=True, help="A folder.")
    flags.add_argument("--rows", type=int, default=25_000)
    flags.add_argument("--kinds", nargs="+", default=["texts", "chat"], choices=["texts", "chat"])
    flags.add_argument("--rounds", type=int, default=3)
    flags.add_argument("--parts", action="store_true")
    given = flags.parse_args()
    tokenizer = str(Path(given.tokenizer).resolve())
    for kind in given.kinds:
        with tempfile.TemporaryDirectory(prefix="lathe-start-") as name:
            write_rows(Path(name), kind, given.rows)
            tell = tell_parts if given.parts else tell_start
            tell(kind, Path(name), tokenizer, given.rounds)


if __name__ == "__main__":
    main()
