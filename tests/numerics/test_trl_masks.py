"""Ids and masks of conversations are those of TRL's SFTTrainer, but for what is written here."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from tests.environments import interpreter_or_skip
from tests.trl_1_16 import masks
from tests.trl_1_16.environment import TRL
from trainer.data.chat.chat_template import ChatTemplate

# By the words of masks.difference: each template of which TRL has a form that marks what is said,
# and each row. Our side has the template as it was published.
PUBLISHED = """
                            plain   system    turns     call   result  thought thoughts  unicode
cohere                          =        =        =    drops  refuses    drops    drops        =
cohere2                         =        =        =    drops  refuses    drops    drops        =
deepseek_r1_distill         opens    opens    opens    drops    drops    drops    drops    opens
deepseekv3                  opens    opens    opens    opens    opens    drops    drops    opens
diffusion_gemma            blanks   blanks   blanks     ends   untold   blanks     text   blanks
gemma                      blanks  refuses   blanks    drops  refuses    drops    drops   blanks
gemma3                     blanks   blanks   blanks    drops  refuses    drops    drops   blanks
glm4moe                      text     text     text     text     text     text     text     text
gptoss                      opens    opens    opens    opens    opens    opens    opens    opens
idefics3                    drops    drops    drops  refuses  refuses    drops    drops    drops
lfm2                       blanks   blanks   blanks    drops    drops    drops    drops   blanks
lfm2_v2                    blanks   blanks   blanks   blanks   blanks    drops    drops   blanks
llama3                          =        =        =    drops    drops    drops    drops        =
llava_next                refuses  refuses  refuses  refuses  refuses  refuses  refuses  refuses
muse_glimmer                opens    opens    opens    opens    opens    opens    opens    opens
nemotron_3_5_lightning      opens    opens    opens    opens    opens    opens     text    opens
nemotron_3_nano             opens    opens    opens    opens    opens    opens     text    opens
nemotron_3_super            opens    opens    opens    opens    opens    opens     text    opens
nemotron_3_ultra            opens    opens    opens    opens    opens    opens     text    opens
phi3                            =        =   blanks    drops    drops    drops    drops        =
phi3_5                          =        =   blanks    drops    drops    drops    drops        =
qwen2_5                     opens    opens    opens    opens    opens    drops    drops    opens
qwen2_5_vl                 blanks   blanks   blanks    drops    drops    drops    drops   blanks
qwen3                      blanks   blanks   blanks   blanks     text   blanks   blanks   blanks
qwen3_5_nothink             opens    opens    opens    opens    opens    opens    opens    opens
qwen3_5_think               opens    opens    opens    opens    opens    opens    opens    opens
qwen3_6                     opens    opens    opens    opens    opens    opens    opens    opens
qwen3_8                     opens    opens    opens    opens    opens    opens    opens    opens
qwen3_instruct_2507        blanks   blanks   blanks   blanks   blanks    drops    drops   blanks
qwen3_vl                   blanks   blanks   blanks   blanks   blanks    drops    drops   blanks
smolvlm                     drops    drops    drops  refuses  refuses    drops    drops    drops
"""
# The cells that differ where TRL's own form is our data.chat_template as well.
IN_TRLS_FORM = {
    "diffusion_gemma": {"thoughts": "blanks"},
    "glm4moe": dict.fromkeys(masks.ROWS, "="),
    "nemotron_3_5_lightning": {"thoughts": "opens"},
    "nemotron_3_nano": {"thoughts": "opens"},
    "nemotron_3_super": {"thoughts": "opens"},
    "nemotron_3_ultra": {"thoughts": "opens"},
    "qwen3": {"result": "blanks"},
}
REASONS = {
    "blanks": "TRL's marks enclose the end of the line behind the token that ends a turn. Generation "
    "stops at that token, so that nothing behind it is ever generated.",
    "opens": "TRL's marks enclose what add_generation_prompt writes (a header, <think>): who "
    "generates gives it, and the model need not.",
    "ends": "Diffusion Gemma's calls end with <|tool_response>, where generation stops for the "
    "result. TRL's marks leave it out.",
    "drops": "The template leaves out the call or the thought, or (Idefics 3, SmolVLM) a content "
    "that is no list of parts. TRL learns the row without it; we say so.",
    "untold": "Diffusion Gemma writes a call, its result and the answer as one turn, with nothing "
    "that opens the answer.",
    "refuses": "The template itself refuses the row: a role or contents of another shape.",
    "text": "TRL's form writes another text:",
}
EARLIER = "TRL's form drops the thoughts of earlier turns as the published one does; we write each "
EARLIER += "turn as it was said."
TEXTS = {
    "diffusion_gemma": EARLIER,
    "glm4moe": "It closes an answer by the token that opens the next turn, and learns that. We learn "
    "no end of earlier answers, since the published template writes none, and the end-of-text token "
    "behind the last.",
    **dict.fromkeys(
        (f"nemotron_3_{one}" for one in ("5_lightning", "nano", "super", "ultra")), EARLIER
    ),
    "qwen3": "It keeps a call's empty thought once the result follows, which the published one drops.",
}

Cells = dict[tuple[str, str], str]  # by template and row


def written(in_trls_form: bool) -> Cells:
    """What the tables above say."""
    names, *lines = (line.split() for line in PUBLISHED.strip().splitlines())
    rows = {template: dict(zip(names, words, strict=True)) for template, *words in lines}
    if in_trls_form:
        rows = {template: row | IN_TRLS_FORM.get(template, {}) for template, row in rows.items()}
    return {(template, name): word for template, row in rows.items() for name, word in row.items()}


def interpreter() -> Path:
    """TRL's; without it the test is skipped, or fails where LATHE_REQUIRE_TRL=1."""
    return interpreter_or_skip(TRL, "LATHE_REQUIRE_TRL")


@pytest.mark.long
@pytest.mark.timeout(600)
def test_ids_and_masks_are_those_of_trl_but_for_the_exceptions(tmp_path: Path) -> None:
    begun = time.monotonic()
    trl = interpreter()
    made_s = time.monotonic() - begun
    pairs = masks.templates(trl)
    bases = ["bytes", *(["starcoder"] if masks.STARCODER.is_dir() else [])]
    for base in bases:
        masks.write_tokenizers(base, pairs, tmp_path)
    of_trl = masks.told(trl, tmp_path)
    counts: dict[bool, Counter[str]] = {False: Counter(), True: Counter()}
    wrong: list[str] = []
    for in_trls_form, of_form in counts.items():
        want = written(in_trls_form)
        assert {template for template, _ in want} == pairs.keys()
        for base in bases:
            for cell, word, seen in found(pairs, tmp_path / base, of_trl[base], in_trls_form):
                of_form[word] += 1
                if word != want[cell]:
                    wrong.append(
                        f"{base}, {cell}, {in_trls_form=}: {word}, not {want[cell]}: {seen}"
                    )
    print(
        f"SHOW {TRL.name}: {len(pairs)} templates x {len(masks.ROWS)} rows, tokenizers "
        f"{' and '.join(bases)}: template as published: {summary(counts[False])}; template in "
        f"TRL's form: {summary(counts[True])} ({made_s:.0f} s for the environment, "
        f"{time.monotonic() - begun - made_s:.0f} s for the rest)"
    )
    assert not wrong, "\n".join(wrong)


def summary(counts: Counter[str]) -> str:
    """The counts of words in a line."""
    others = ", ".join(f"{number} {word}" for word, number in counts.most_common() if word != "=")
    return f"{counts['=']} of {counts.total()} equal, otherwise {others}"


def found(
    pairs: dict[str, tuple[str, str]], folder: Path, of_trl: dict[str, Any], in_trls_form: bool
) -> Iterator[tuple[tuple[str, str], str, str]]:
    """Each template and row, the word for it, and what there is to see."""
    for template, (published, form) in pairs.items():
        assert of_trl[template]["training"] == form  # what SFTTrainer takes
        tokenizer = AutoTokenizer.from_pretrained(folder / template)
        tokenizer.chat_template = form if in_trls_form else published
        chat = ChatTemplate.of(tokenizer, None, None)
        for name, row in masks.ROWS.items():
            told = of_trl[template]["rows"][name]
            yield (template, name), *masks.difference(chat, row, told)


def test_each_exception_has_its_reason() -> None:
    cells = [*written(in_trls_form=False).items(), *written(in_trls_form=True).items()]
    assert {word for _, word in cells} - {"="} == REASONS.keys()
    assert {template for (template, _), word in cells if word == "text"} == TEXTS.keys()
