"""The program of a card gives the exported model the very ids that predict gives it: of every task,
for tokenizers that open texts with a token and for those that do not.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tokenizers import (
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from torch import Tensor
from transformers import ByT5Tokenizer, PreTrainedTokenizerFast
from transformers.utils import chat_template_utils

from tests.bases import DECODERS, base_of
from tests.facts import experiment, facts, write_facts
from tests.long import long_but
from tests.stranger import CODE, PROGRAM
from trainer import tasks
from trainer.commands.options import module_of
from trainer.evaluation.predict import export_of
from trainer.exports import card, record
from trainer.protocol.task import Places
from trainer.tasks.cross_attention.decoder.generation import most_prompt_tokens

# Tokenizers
# --------------------------------------------------------------------------------------------------

SIZE = 384  # ids of a tokenizer at most, which no other embedding of a base has
END, PAD, BEGIN, UNKNOWN = "</s>", "<pad>", "<s>", "<unk>"
SPECIAL = [END, PAD, BEGIN, UNKNOWN]
NAMED: dict[str, Any] = {"eos_token": END, "pad_token": PAD, "unk_token": UNKNOWN}


def around(text: str, *tokens: str) -> Any:
    """What puts tokens around a text that is to have special ones."""
    numbered = [(token, SPECIAL.index(token)) for token in tokens]
    return processors.TemplateProcessing(single=text, special_tokens=numbered)


def trained(model: Any, trainer: Any, **parts: Any) -> Tokenizer:
    backend = Tokenizer(model)
    for name, part in parts.items():
        setattr(backend, name, part)
    backend.train_from_iterator((row["text"] for row in facts(0, 64)), trainer)
    return backend


def of_bytes(post_processor: Any = None) -> Tokenizer:
    """As GPT-2's; with a token that opens texts, as Llama 3's."""
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=SIZE, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    parts: dict[str, Any] = {"pre_tokenizer": pre_tokenizers.ByteLevel(add_prefix_space=False)}
    backend = trained(models.BPE(), trainer, **parts, decoder=decoders.ByteLevel())
    if post_processor is not None:
        backend.post_processor = post_processor
    return backend


def of_pieces() -> Tokenizer:
    """As Llama 2's and Gemma's: a blank is a letter, one stands before every text."""
    trainer = trainers.BpeTrainer(vocab_size=SIZE, special_tokens=SPECIAL, show_progress=False)
    blanks = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    backend = trained(
        models.BPE(unk_token=UNKNOWN), trainer, normalizer=normalizers.Sequence(blanks)
    )
    backend.post_processor = around(f"{BEGIN} $A", BEGIN)
    return backend


def of_unigrams() -> Tokenizer:
    """As T5's."""
    trainer = trainers.UnigramTrainer(
        vocab_size=200, special_tokens=SPECIAL, unk_token=UNKNOWN, show_progress=False
    )
    backend = trained(models.Unigram(), trainer, pre_tokenizer=pre_tokenizers.Metaspace())
    backend.post_processor = around(f"$A {END}", END)
    return backend


def of_words() -> Tokenizer:
    """As BERT's, whose first and last token have names of their own."""
    trainer = trainers.WordPieceTrainer(
        vocab_size=SIZE, special_tokens=SPECIAL, show_progress=False
    )
    backend = trained(
        models.WordPiece(unk_token=UNKNOWN),
        trainer,
        normalizer=normalizers.BertNormalizer(),
        pre_tokenizer=pre_tokenizers.BertPreTokenizer(),
    )
    backend.post_processor = around(f"{BEGIN} $A {END}", BEGIN, END)
    return backend


def save(name: str, folder: Path) -> None:
    if name == "byt5":
        ByT5Tokenizer(extra_ids=0).save_pretrained(folder)
        return
    backend, more = _TOKENIZERS[name]
    PreTrainedTokenizerFast(tokenizer_object=backend(), **NAMED | more).save_pretrained(folder)


_TOKENIZERS: dict[str, tuple[Callable[[], Tokenizer], dict[str, Any]]] = {
    "gpt": (of_bytes, {"bos_token": END}),
    "llama 3": (lambda: of_bytes(around(f"{BEGIN} $A", BEGIN)), {"bos_token": BEGIN}),
    "opt": (lambda: of_bytes(around(f"{END} $A", END)), {"bos_token": END}),
    "llama 2": (of_pieces, {"bos_token": BEGIN}),
    "t5": (of_unigrams, {}),
    "roberta": (of_words, {"bos_token": BEGIN, "cls_token": BEGIN, "sep_token": END}),
    # a text ends with one token, and with the end token behind it
    "closed": (
        lambda: of_bytes(around(f"{BEGIN} $A {PAD}", BEGIN, PAD)),
        {"truncation_side": "left"},
    ),
    "no pad": (lambda: of_bytes(around(f"{BEGIN} $A", BEGIN)), {"pad_token": None}),
    "bert": (of_words, {"eos_token": None, "cls_token": BEGIN, "sep_token": END}),
}

# Exports
# --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = write_facts(tmp_path_factory.mktemp("facts"))
    for name, template in TEMPLATES.items():
        (made / name).write_text(template)
    return made


def exported(values: dict[str, Any], folder: Path, out: Path) -> Any:
    """The task that predicts from the export of random weights in `out`."""
    task: Any = tasks.load(tasks.parse(values), Places(folder, folder / "cache", folder))
    with torch.random.fork_rng():
        model = task.model()
    task.export({name: one.detach() for name, one in model.named_parameters()}, out)
    written = record.of_run(out, values=values, task=task, run_folder=out)
    record.write(out, written)
    card.write(out, written)
    of_export, _ = export_of(out)
    return tasks.load(tasks.parse(of_export), Places(folder, folder / "cache", folder))


def programs(out: Path) -> list[str]:
    (part,) = PROGRAM.findall((out / "README.md").read_text())
    return [code.replace('FOLDER = "."', f"FOLDER = {str(out)!r}") for code in CODE.findall(part)]


class Enough(Exception):
    """A program has shown what it reads."""


def read_by(program: str, num_rows: int, monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """The first rows of ids that a program looks up in the embedding of tokens; it ends there."""
    looked_up: list[list[int]] = []
    plain = F.embedding

    def embedding(ids: Tensor, weight: Tensor, *rest: Any, **how: Any) -> Tensor:
        if len(weight) == SIZE:
            looked_up.extend(ids.reshape(-1, ids.shape[-1]).tolist())
        if len(looked_up) >= num_rows:
            raise Enough
        return plain(ids, weight, *rest, **how)

    with monkeypatch.context() as patched:
        patched.setattr(F, "embedding", embedding)
        # a program may stop its clock, and a template is compiled with the clock of its first use
        patched.setattr(chat_template_utils, "datetime", chat_template_utils.datetime)
        chat_template_utils._compile_jinja_template.cache_clear()
        with pytest.raises(Enough):
            exec(program, {"__name__": "card"})
    return looked_up


def with_texts(program: str, **texts: Any) -> str:
    """The program with other values of some of its names."""
    for name, text in texts.items():
        (old,) = re.findall(rf"^{name} = .*$", program, re.M)
        program = program.replace(old, f"{name} = {text!r}")
    return program


# Tasks
# --------------------------------------------------------------------------------------------------

TEXTS = {  # as people write them
    "plain": "Where is the red key?",
    "blanks": "  Ada keeps\tthe  red key. \n",
    "opened": f"{BEGIN}Where is the red key?",
    "long": "Where is the red key? " * 30,
}
TURNS = "{% for m in messages %}{{ '<' ~ m.role ~ '>' ~ m.content }}{% endfor %}"
ANSWER = "{% if add_generation_prompt %}<assistant>{% endif %}"
TEMPLATES = {
    "opened.jinja": "{{ bos_token }}" + TURNS + ANSWER,
    "opened later.jinja": "\n{{ bos_token }}" + TURNS + ANSWER,
    "dated.jinja": "{{ date_string or 'no day' }}" + TURNS + ANSWER,
    "clock.jinja": "{{ strftime_now('%d %m %Y') }}" + TURNS + ANSWER,
}
CONVERSATIONS = {  # by the roles of their turns
    "user": [TEXTS["plain"]],
    "system, user": ["Be brief.\n", TEXTS["blanks"]],
    "user, assistant, user": [TEXTS["plain"], "Here.", TEXTS["opened"]],
}


def ids_of_text(task: Any, program: str, text: str) -> tuple[str, list[list[int]]]:
    """The program with this text, and the ids of predict."""
    row = trained_of(task).row_to_predict(task, {"text": text}, "here")
    return with_texts(program, text=text), [row["ids"]]


def trained_of(task: Any) -> Any:
    return module_of(task.cfg.task, "trained", "predict")


def ids_of_document(task: Any, program: str, text: str) -> tuple[str, list[list[int]]]:
    row = trained_of(task).row_to_predict(task, {task.cfg.data.document: text}, "here")
    return with_texts(program, document=text), [list(task.encode(row)["source"])]


def ids_of_passages(task: Any, program: str, text: str) -> tuple[str, list[list[int]]]:
    passages = [("Ada", text), (text, "The attic is empty. "), ("", "A coin.")]
    ctxs = [{"title": title, "text": body} for title, body in passages]
    raw = {"question": text, "ctxs": ctxs}
    encoded = task.encode(trained_of(task).row_to_predict(task, raw, "here"))
    program = with_texts(program, passages=passages)
    return replaced(program, '"Where does Ada keep the red key?"', text), task._prompts_of(encoded)


def ids_of_statement(task: Any, program: str, text: str) -> tuple[str, list[list[int]]]:
    row = trained_of(task).row_to_predict(task, {"statement": text}, "here")
    return with_texts(program, statements=[text]), [task.statement_ids(row["statement"])]


def ids_of_sides(task: Any, program: str, text: str) -> tuple[str, list[list[int]]]:
    raw = {"query": text, "contexts": [text]}
    row = trained_of(task).row_to_predict(task, raw, "here")
    of_sides = [
        *task.ids([{"text": row["query"]}], side="query"),
        *task.ids(row["ctxs"], side="passage"),
    ]
    if task.cfg.data.append_eos:
        assert [ids.count(task.tokenizer.eos_token_id) for ids in of_sides] == [1, 1]
    program = replaced(program, '"Where is the red key?"', text)
    return replaced(program, '"Ada keeps the red key in the cellar."', text), of_sides


def ids_of_context(task: Any, program: str, text: str) -> tuple[str, list[list[int]]]:
    raw = {"question": text, "contexts": [text]}
    encoded = task.encode(trained_of(task).row_to_predict(task, raw, "here"))
    most = most_prompt_tokens(task.skeleton(), task.cfg.data.answer_tokens)
    context = task.prompts.contexts([encoded], "context")["context_input_ids"]
    prompt = task.prompts.asked([encoded], most)["input_ids"]
    program = with_texts(program, question=text)
    program = replaced(program, '"Ada keeps the red key in the cellar."', text)
    return program, [context.flatten().tolist(), *prompt.tolist()]


def replaced(program: str, old: str, new: str) -> str:
    assert old in program, program
    return program.replace(old, repr(new))


_ASKED: dict[str, Callable[[Any, str, str], tuple[str, list[list[int]]]]] = {
    "causal_lm": ids_of_text,
    "summariser": ids_of_document,
    "fid": ids_of_passages,
    "vera": ids_of_statement,
    "retriever": ids_of_sides,
    "cross_attention": ids_of_context,
}
# (task, base, tokenizer, blocks of the experiment)
CASES: list[tuple[str, str, str, dict[str, Any]]] = [
    ("causal_lm", "gpt_bigcode", "gpt", {}),
    ("causal_lm", "llama", "llama 2", {}),
    ("causal_lm", "llama 3.2", "llama 3", {}),
    ("causal_lm", "llama", "opt", {}),
    ("causal_lm", "gemma2", "llama 2", {}),
    ("causal_lm", "mistral", "t5", {}),
    ("summariser", "t5", "t5", {"data": {"prefix": "summarise: "}}),
    ("summariser", "byt5", "byt5", {}),
    ("summariser", "t5gemma", "llama 2", {}),
    ("summariser", "t5", "gpt", {}),
    ("fid", "t5", "t5", {}),
    ("fid", "byt5", "byt5", {}),
    ("fid", "t5", "gpt", {}),
    ("fid", "t5", "llama 2", {}),
    ("vera", "t5", "t5", {}),
    ("vera", "byt5", "byt5", {}),
    ("vera", "llama", "llama 3", {}),
    ("vera", "gemma3", "llama 2", {}),
    ("retriever", "bert", "bert", {}),
    ("retriever", "roberta", "roberta", {}),
    ("retriever", "roberta", "roberta", {"data": {"append_eos": True}}),
    ("retriever", "t5", "t5", {}),
    ("retriever", "t5", "t5", {"data": {"append_eos": True}}),
    ("retriever", "bert", "closed", {"data": {"append_eos": True}}),
    ("retriever", "llama", "llama 3", {"data": {"append_eos": True}}),
    ("retriever", "qwen3", "gpt", {"data": {"append_eos": True}}),
    ("cross_attention", "gpt_bigcode", "gpt", {}),
    ("cross_attention", "llama", "llama 3", {"data": {"chunked": True, "template": "plain"}}),
    ("cross_attention", "gemma2", "llama 2", {"data": {"answer_tokens": 110}}),
    ("cross_attention", "mistral", "opt", {"data": {"question_on_context": True}}),
]
NAMES = [" ".join((*case[:3], *case[3].get("data", {}))) for case in CASES]
SHORT = (
    *("causal_lm llama llama 2", "summariser t5 t5 prefix", "fid t5 llama 2", "vera llama llama 3"),
    *("retriever t5 t5 append_eos", "retriever bert closed append_eos"),
    "cross_attention gemma2 llama 2 answer_tokens",
)
_OWN: dict[str, dict[str, Any]] = {
    "causal_lm": {"data": {"source": "files"}},
    "summariser": {"generation": {"max_tokens": 2, "min_tokens": 0, "num_beams": 1}},
    "fid": {"data": {"answer_tokens": 2}},
    "cross_attention": {"data": {"answer_tokens": 2}},
    "retriever": {"data": {"query_prefix": "query: "}},
}


def values_of(
    task: str, base: str, tokenizer: str, own: dict[str, Any], folder: Path
) -> dict[str, Any]:
    blocks = {name: {**_OWN.get(task, {}).get(name, {}), **block} for name, block in own.items()}
    values: dict[str, Any] = experiment(task, folder, **{**_OWN.get(task, {}), **blocks})
    if not (folder / tokenizer).is_dir():
        save(tokenizer, folder / tokenizer)
    if task == "retriever" and base in DECODERS:
        values["encoder"] = {**values["encoder"], "pooling": "eos"}
    of_base = base_of(task, base, vocab_size=SIZE)
    return {**values, "base": of_base, "tokenizer": str(folder / tokenizer)}


@pytest.mark.parametrize("name", long_but(SHORT, NAMES))
def test_a_card_reads_a_text_as_predict_does(
    name: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = CASES[NAMES.index(name)]
    predicts = exported(values_of(*case, folder), folder, tmp_path)
    *_, program = programs(tmp_path)
    for kind, text in TEXTS.items():
        if (case[0], kind) == ("causal_lm", "long"):  # predict leaves out its beginning
            continue
        with_own_texts, want = _ASKED[case[0]](predicts, program, text)
        assert read_by(with_own_texts, len(want), monkeypatch) == want, kind


@pytest.mark.long
@pytest.mark.parametrize("case", [("bert", "bert"), ("t5", "t5"), ("llama", "no pad")])
def test_sentence_transformers_reads_a_text_as_predict_does(
    case: tuple[str, str], folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own: dict[str, Any] = {"data": {"query_tokens": 32, "passage_tokens": 32}}
    task = exported(values_of("retriever", *case, own, folder), folder, tmp_path)
    program, _ = programs(tmp_path)
    for kind, text in TEXTS.items():
        with_own_texts, want = ids_of_sides(task, program, text)
        assert read_by(with_own_texts, len(want), monkeypatch) == want, kind


CHATS = {
    f"{tokenizer}, {template}": (tokenizer, template)
    for tokenizer in ("gpt", "llama 2", "llama 3", "opt")
    for template in ("chatml", "plain", *TEMPLATES)
}


@pytest.mark.parametrize(
    "name", long_but(["llama 3, opened later.jinja", "opt, plain", "gpt, clock.jinja"], CHATS)
)
def test_a_card_reads_a_conversation_as_predict_and_training_do(
    name: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer, template = CHATS[name]
    chat = {"data": {"source": "chat", "chat_template": template}}
    task = exported(values_of("causal_lm", "llama", tokenizer, chat, folder), folder, tmp_path)
    (program,) = programs(tmp_path)
    for roles, texts in CONVERSATIONS.items():
        messages = [
            {"role": role, "content": text}
            for role, text in zip(roles.split(", "), texts, strict=True)
        ]
        want = task.prompt_ids({"messages": messages}, "here")
        with_own_turns = with_texts(program, messages=messages)
        assert read_by(with_own_turns, 1, monkeypatch) == [want], roles
        answered = [*messages, {"role": "assistant", "content": "There."}]
        (learnt,) = task.chat.tokens([{"messages": answered}], task.end)
        # the last tokens of a prompt may be others with an answer behind them
        assert learnt["ids"][: len(want) - 3] == want[:-3], roles
        if roles == "user" and task.opening:
            assert want.count(task.opening[0]) == 1
