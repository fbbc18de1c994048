"""The wording of errors: the one file of tests in which it stands.

A test names a fault by its code and states the values that the message must tell:

    with refused("id_twice", at="train.jsonl, line 3", id="a"):
        read(...)

`refused` wants the type of error that the table gives, the exit code of that type, and a message
that the code's pattern fits. `says` wants the same of a text: of standard error, of the body of an
answer, or of an error that was caught already. A better sentence in the product changes one
line of this table, and no test.

A pattern holds the words that tell the fault from others, not the whole sentence:

    {key}     the value of that field as text; any text, if a test does not state it
    '{key}'   the same with Python's quotes
    ...       any text

A value that is a compiled regular expression is searched for as it is. Three fields are known to
every code: `at` is what stands right before the pattern (a file, a file and its line), `nearest`
the name that the message proposes, `legal` the names that it lists.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from jobs.errors import NothingMatched, Refused, SomeFailed, Transient, Unreachable
from jobs.record.events import Busy
from trainer.data.formats.json_text import BadJson
from trainer.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    DivergedError,
    DoesNotFitError,
    LatheError,
    RankLostError,
    ReplayDiffers,
    ResumeError,
    StorageError,
    UserError,
)
from trainer.operations.operation_log import OperationConflict, OperationGap
from trainer.plan.memory.measure import MeasuringError
from trainer.recipes.vera.problem import BadRecord

# Stated here once more: a test that read them from the classes could not fail.
EXIT_CODES: dict[type[LatheError], int] = {
    LatheError: 1,
    UserError: 2,
    SomeFailed: 3,
    Unreachable: 4,
    NothingMatched: 5,
}


@dataclass(frozen=True)
class Wording:
    """errors: the types that say it, none for a text that is no message of an error."""

    pattern: str
    errors: tuple[type[Exception], ...]


@dataclass(frozen=True)
class Fault:
    """A code and the fields of one case, for the rows of a parametrized test."""

    code: str
    fields: dict[str, Any]

    @property
    def __name__(self) -> str:
        """pytest names the row by it."""
        return self.code


def fault(code: str, /, **fields: Any) -> Fault:
    """The fault of one row of a parametrized test: `refused` takes it in place of a code."""
    return Fault(code, fields)


def wording(*errors: type[Exception], **patterns: str) -> dict[str, Wording]:
    return {code: Wording(pattern, errors) for code, pattern in patterns.items()}


# Files and the disk
FILES = (
    wording(
        StorageError,
        disk_full="No space left on device. Free some space",
        file_unwritable="{reason}. Check that the folder exists and can be written",
        cache_unwritable="cannot be written: {reason}. ...choose another cache folder",
        out_unwritable="cannot be written ...Free space there",
        file_being_saved="Another process is saving here",
        metrics_file_changed="it was changed while this run",
        savedir_is_file="is a file. Give a folder",
    )
    | wording(
        ResumeError,
        lock_held="another process is training this experiment",
        rounds_held="{folder}: another process makes these rounds",
        lock_removed="was removed while this process held it",
    )
    | wording(
        ConfigError,
        pieces_of_others="holds pieces of a command with another {changed}. Give",
        path_exists="exists already, and nothing is overwritten",
        out_folder_absent="its folder does not exist",
        out_is_folder="{out}: is a folder. Want the name of a file",
        out_packed="{out}: got a name in .gz, but what is written is not packed",
    )
    | wording(
        LatheError,
        stream_worker_killed="a process that encodes rows ended with {code}",
        worker_killed="one of {count} processes that encode rows was killed...{fix}.",
    )
)

# Runs that a word names, and published tasks on them
HARNESSES = wording(
    ConfigError,
    run_twice="evaluate {word}: it names a run, and {flag} names another",
    harness_names_wanted="{flag} {text!r}: want names of tasks",
    harness_twice="--lm_eval and --mteb: a model either writes texts or embeds them",
    harness_flag_alone="{flags}: got no {wanted}, to which that belongs",
    harness_with_split="got {flags} as well, which say how a split of the run's own data",
    lm_eval_without_texts="task {task!r} trains no model that continues texts...do: {others}.",
    lm_eval_of_reward="this model continues no texts: it is a reward model",
    lm_eval_without_template="the tokenizer of this run has no chat template",
    lm_eval_task_unknown="--lm_eval {task}: lm-eval {version} has no such task",
    lm_eval_data_absent="--lm_eval {task}: lm-eval cannot read the tasks or their data",
    mteb_without_vectors="task {task!r} computes no vectors of texts",
    mteb_with_limit="MTEB's tasks are run as a whole",
    mteb_task_unknown="--mteb {task}: mteb {version} has no such task",
    mteb_data_absent="--mteb {task}: their data cannot be read",
)

# Rows that are encoded while they are trained on
STREAMS = (
    wording(ResumeError, stream_grew="{then} rows then, {now} now")
    | wording(
        ConfigError,
        stream_of_hub_id="data.dataset='{dataset}' is no folder here...Fetch it",
        stream_of_no_files="the training rows of this task ({task}...not read one by one from files",
        stream_with_share="stream=True with valid_share={share}, which has to read every row",
        stream_of_no_rows="stand one by one in files of yours, {source} has none such",
        stream_with_keys="stream=True with {keys}, for which every row has to be read",
        stream_reads_together="{place} reads otherwise by itself",
    )
    | wording(
        DataError,
        stream_changed="{path} changed while its rows are read",
        stream_lost_labels="that were met so far...more than train.max_lost_labels={most}",
    )
)

# Text that no program could use
ODD_TEXT = wording(
    DataError,
    BadJson,
    json_half_pair="{escape}...half of a surrogate pair, as of an emoji that was cut in two",
    json_too_deep="nested deeper than {depth} levels",
    json_long_number="an integer beyond 64 bits; write it as text",
    json_infinite="a number beyond those of 64 bits, which is infinite",
    json_key_twice="the key {key!r} stands twice in one object",
) | wording(
    DataError,
    file_endless="its first {packed} bytes unpack to more than",
    line_endless="longer than {most} bytes",
    rows_absent="holds no file of rows, but {names}. Put train.jsonl there",
    text_endless="{key!r} is a text of {count} characters, want at most {most}",
    table_without_header="It has no header either",
    table_row_for_header="which holds a list, so it is a row and no header",
)

# Folders of shards
SHARDS = wording(
    ConfigError,
    StorageError,
    shards_folder_taken="{folder} holds other files and no {content} of ours. Name",
    shards_of_others="{folder} was begun with something else ({differences}). Name a new {flag}, or",
) | wording(
    StorageError,
    plan_torn="{path} cannot be read (...). Delete {folder} and {command} anew",
)

# Rows, tables and the files that hold them
DATA_FILES = wording(
    DataError,
    mix_too_small="'{name}' has {size} rows, and a step takes up to {most} of it",
    mix_absent="'{name}': there is no {path}",
    mix_source="data.mix['{name}']: ...",
    data_changed_since="{folder} is finished, and its {splits} rows are others than those that it was trained on...Start over with -r 1",
    strict_refuses="--strict: got what is left out of the data, or doubted, want nothing...{count} {why}: {places}\nMend",
    file_unreadable="cannot be read: {reason}. Put it there...--data_path",
    file_unpacked="cannot be read behind {place}: ...take .gz from its name",
    file_torn="cannot be read behind {place}: ...Fetch it again",
    file_empty="is empty. Put",
    list_empty="is an empty list",
    json_malformed="malformed JSON ({reason}); write one object a line",
    json_list_malformed="malformed JSON ({reason}); write one list of objects.",
    json_no_object="a JSON {kind}, want an object",
    not_utf8="byte {byte} is not UTF-8; save",
    other_kind_of_file="byte {byte} is not UTF-8 ({kind}",
    file_kind="want a file that ends in {endings}, each also",
    data_path_missing="--data_path, and none was given. Point it at a folder that holds {files}, or use",
    data_path_is_file="is a file, want the folder that holds it",
    data_path_is_file_of_a_run="it is a file, and its folder is wanted, which holds every split: {folder}.",
    data_path_absent="there is no such folder (from",
    split_file_absent="holds no {split} split: none of {names}, nor any with {endings}. Put it there, name another in {key}, or point",
    split_in_two_files="holds {files}. Say in {key} which",
    part_malformed="got [{part}], want a part such as",
    part_empty="has no row in {part}.",
    share_of_two_files="holds {files}. data.valid_share takes...name that in {key},",
    split_unknown="split={split!r} does not exist...Use {choices}.",
    split_has_no_line="has no line whose split is {split},",
    split_has_no_question="has no question whose split is {split}.",
    set_has_no_split="has no split {split!r}. Name its splits in {key}.",
    set_unreadable="data.dataset={dataset!r}, split {split!r}: ...data.subset and {key} choose within it",
    sources_absent="holds no source files...another data.source",
    table_one_column="its header is ...separated by {separator!r}, want {wanted!r}",
    folder_of_others="holds what is no file of rows: {others}. Want files",
    table_quote_open="a quote opens the text and is not closed in its line",
    column_binary="'{key}' is {value!r}, bytes of a binary column",
    folder_of_twins="is read as one split, and holds rows twice: {twins}. Take one of each out",
    table_more_fields="{count} fields, and the header names {names}",
    table_header_again="the header once more",
    table_column_twice="the header names {column!r} twice",
    table_row_fields="not as many fields as the {columns} columns of the header: {fields}. It ends in line {line}.",
    table_empty="holds no row",
    table_row_unreadable="{reason}. Save it as UTF-8, with texts quoted as CSV",
    table_cell_half_list="'{key}' is {value!r}, which looks like a list and cannot be read as one...{problem}...Write it as JSON",
    qa_fields="{count} tab-separated field(s), which ends in line {line}; want a question and the list",
    tabs_wanted="{count} tab-separated field(s), want {wanted}, none of them blank",
    marco_split_absent="holds no {split} split of MS MARCO",
    kilt_pages_absent="holds no {file}, where the pages are that KILT's rows name",
    column_absent_in_line="no such column. {column!r}: ...Say in data.columns",
)
ROWS = wording(
    DataError,
    field_missing="'{key}' is missing (keys: {keys})",
    contexts_missing="'{key}' is missing, and so are 'contexts' and 'context' (keys: {keys})...Write \"ctxs\": []",
    messages_missing="'messages' is missing, and so are 'prompt' and 'completion' (keys: {keys}). Say in data.columns",
    rows_of_unsaid_format="its rows are {format} rows, and data.source={source!r} reads {wanted}. Say {fix} in data",
    rows_of_unread_format="its rows are {format} rows: format={name!r} holds",
    rows_mixed="{what}, want that of {first}, {format!r}: {holds}. Mend it, or give rows of one format",
    format_field_missing="{key} is missing (keys: {keys}); the format {format!r} is",
    kilt_page_unknown="there is no page {page!r}.",
    marco_id_unknown="{what} {id!r} is in no {file}.",
    history_wanted="history[{number}] is {value!r}, want an instruction and its output",
    prompt_without_place="'{key}' is {value!r}, which Alpaca's prompt has no place for",
    one_of_two_wanted="'{key}' or '{other}' is wanted, {which} there",
    answers_or_target_missing="neither 'answers' nor 'target' is there (keys: {keys})",
    text_wanted="'{key}' is {value!r}, want text.",
    text_blank="'{key}' is {value!r}, want text that is not blank",
    texts_wanted="'{key}' is {value!r}, want a list of texts",
    text_or_texts_wanted="'{key}' is {value!r}, want a text or a list of texts",
    passages_wanted="'{key}' is {value!r}, want a list of passages",
    id_wanted="'{key}' is {value!r}, want an id: a number without decimals",
    id_with_blanks="'{key}' is {value!r}, want an id: an integer, or text without blanks",
    token_ids_wanted="'{key}' is {value!r}, want token ids",
    number_wanted="'{key}' is {value!r}, want a finite number",
    flags_wanted="'{key}' is {value!r}, want a 0 or 1 for each",
    label_unknown="'{key}' is {value!r}, want one of {choices}.",
    label_says_it_all="a statement with a label is true or false by itself. Name task {task!r} in data.boolean",
    titles_for_contexts="{titles} titles for {contexts} contexts",
    text_and_title_missing="text and title are missing or blank (keys: {keys})",
    neither_text_nor_id="'{key}' has neither text nor id (keys: {keys})",
    id_with_white_space="the id {id!r} holds white space",
    id_twice="the id {id!r} stands twice",
    bm25_no_word="the {count} passages hold no word",
    qrels_of_others="{path} judges no passage ...such as '{question}'",
    id_of_two_texts="two {what} have the id {id!r}, one of them {text!r}",
    gold_unknown="gold={gold} is no id in",
    row_of_other_set="no row of the {split} split is of the data set {dataset!r}.",
    split_without_rows="the {split} split has no rows",
    batch_above_rows="has {rows} rows, fewer than train.global_batch={global_batch}. Use a global_batch of at most {most},",
    rows_changed="the {split} rows changed while they were read",
    encoded_kind="row {row}: field {field!r} is encoded as {value!r}, want a flat list of 32-bit integers",
    encoded_fields="row {row} is encoded as {fields!r}, the first row as {first!r}",
    labels_cut="cut {lost} of the {count} label tokens off the {split} split ({share}), more than train.max_lost_labels={most}:",
    nothing_to_calibrate="No statements",
    logits_not_finite="{bad} of {count} logits or scores are not finite",
    label_count="{statements} statements, {labels} labels",
)
CONVERSATIONS = wording(
    DataError,
    messages_wanted="'messages' is {value!r}, want a list of objects",
    turn_wanted="messages[{turn}] is {value!r}, want an object",
    role_wanted="{turns}[{turn}].role is {value!r}, want system",
    content_wanted="{turns}[{turn}].content is {value!r}, want text",
    said_elsewhere='{name} is {value!r}, want what is said as "content"',
    part_wanted="{name} is {value!r}, want a part,",
    part_unread="{name} is {value!r}, want 'text' alone",
    prompt_wanted="'{key}' is {value!r}, want text, or a list of objects with role and content",
    input_beside_turns="'input' is {value!r}, want it in a turn of",
    weight_wanted="messages[{turn}].{key} is {value!r}, want 0 or 1,...(this one is of {role!r})",
    learning_key_unknown='messages[{turn}].{key} is {value!r}, want "weight": 0 or 1',
    functions_of_row="'functions' is {value}, want the functions in \"tools\":",
    learning_of_row="'{key}' is {value!r}, want a \"weight\" of 0 or 1",
    learning_keys_differ="messages[{turn}].{key} is {value!r}, want the same as in {other!r}",
    old_call_unread="messages[{turn}].function_call is {value!r}, want a call in",
    turn_empty="messages[{turn}].content is {value!r}, want what the assistant says",
    calls_wanted="messages[{turn}].content is {value!r}, want JSON of",
    system_differs="'system' is {value!r}, want the same text as in the first turn, {first!r}",
    nothing_to_learn="no turn of the assistant counts",
    list_of_wanted="'{key}' is {value!r}, want a list",
    assistant_alone="nobody but the assistant speaks",
    template_drops="does not write {what} of turn {turn} of {turns}.",
    template_turn_unopened="turn {turn} of {turns} does not begin as the template opens it.",
    template_without_opening="has no add_generation_prompt, which opens turn {turn} of {turns}.",
    template_refuses="begins {start!r}: the chat template ...{reason}.",
) | wording(
    ConfigError,
    messages_of_no_chat="got messages, but the model has not learnt",
    template_missing="has no chat template. Set data.chat_template: a file",
    template_unreadable="data.chat_template={template!r}: cannot be read",
    template_unknown="{template!r} is no file here or below --data_path...({choices})",
)
PASSAGES = wording(
    DataError,
    corpus_header="the header is {header!r}, want id, text and title",
    corpus_fields="{count} tab-separated field(s), want id, text and title",
    corpus_blank="the id or the text is blank",
    corpus_empty="holds no passage",
    corpus_quotes="{reason}, in a file whose fields",
    corpus_unknown_passage="passage {passage!r} is not in the corpus",
    corpus_not_named="passage {passage!r} is given by its id alone. Name the corpus in data.corpus",
    passage_missing="has no passage {passage!r} ({missing} of {count} are missing)",
    passage_twice="a passage stands twice for question {question!r}",
    id_of_two_vectors="two vectors have the id {id!r}: in {folder}/ids.txt and in {other}/ids.txt",
    no_negative_passage="query {query!r} has no negative passage",
    no_negative_left="the judge takes every negative of all {count} questions for a positive",
    near_copies="{count} of {all} training questions are near copies of held-out ones",
    near_copy_of="question {id!r} ...is nearly question {other!r} of {split}",
    only_near_copies="all {count} training questions are near copies of held-out ones",
    no_train_positive="none of the {count} training questions has a relevant passage",
    share_leaves_none="--valid_share {share} holds all {count} questions out",
    no_valid_positive="none of the {count} validation questions has a relevant passage",
    no_positive_and_negative="no question has a positive and a negative",
    no_answers="no question has answers",
    rank_or_score="the third column is {value!r}, {where}: is it a rank or a score",
    ranking_columns="{count} columns, want 3 ... or 6 ..., the same on every line",
    rank_wanted="the rank is {value!r}, want an integer",
    score_wanted="the score is {value!r}, want a finite number",
    ranking_of_others="for none of the {count} questions...its ids are like {ours!r}, theirs like {theirs!r}",
    judgement_columns="{value!r}, want question, iteration, passage, relevance",
    judgements_header="the header is {value!r}, want the question first",
    judged_twice="the relevance of passage {passage!r} for question {question!r} is {relevance}, want {before} as in an earlier line",
    judgements_empty="holds no judgement",
) | wording(
    ConfigError,
    switch_word="{name}={word} in the environment: want {on} or {off}, or the variable unset",
    switches_of_ranks="{name} is {word} on rank 0 and {other} on rank {rank}",
    liger_needs_gpu="liger-kernel's kernels run on a CUDA GPU, and this run has a processor",
    near_limit="--near {value}: want a similarity above 0 and at most 1",
    limit_finite="{flag} {value}: want a finite number",
    valid_or_share="--valid_queries ...and --valid_share: got {got}, want one",
    valid_share="--valid_share {value}: want a share",
    mining_by="--by {value}: want model, bm25, both",
    rounds_task='rounds: got task "{task}"{form}, want a retriever of vectors',
    rounds_random="rounds: the base of this experiment has random weights",
    rounds_keys="rounds: {keys} of this experiment has no meaning there",
    rounds_teacher="rounds: loss.distillation (or false_negatives.by) of this experiment learns",
    rounds_of_others="was mined with vectors of another model: {was}..., and the one of round "
    "{round} is {now}... now",
    judge_absent="--judge_above and --judge_margin are limits of a judge's scores",
    fuse_one_run="--run is given once",
    fuse_weights="{got} --weight for {want} --run",
    fuse_weight="--weight {got}: want a number of at least 0",
    fuse_of_others="--run ...{path}: its questions, such as '{question}', are in no other run",
    fuse_nothing="every --weight is 0",
    only_of_others="--only: none of its {count} ids, such as '{id}', is ...such as '{question}'",
    run_tag="--tag {got}: want one word",
    scored_two_kinds="got {flags} with --scored, whose rows are measured as they are",
    split_of_no_queries="--split {split} says which of --queries count, and there are none",
    no_vectors_of_pairs='task {task!r} of form="{form}" makes no vectors',
    drop_without_rows="--drop_above and --drop_margin leave negatives of training rows out",
    rank_range="want a count of at least 1, and ranks 1 <= first <= last",
    depth_wanted="--depth {depth}: want at least 1",
    vectors_of_two_widths="vectors of {width} and of {other} numbers",
    faiss_unknown="--faiss {index}: FAISS knows no such index",
    faiss_no_graph="--faiss {index}: a graph of less than 2 links",
    faiss_cannot="--faiss {index}: FAISS makes no such index of these vectors",
    faiss_training="--faiss {index}: {count} vectors are too few to train it",
    index_of_other_kind="holds an index {has}, want {wanted}",
    index_of_other_model="is an index of vectors of the model {has} ...; ... is of the model {wanted}",
    index_of_other_vectors="is an index of other vectors, or of the same in another order",
    index_knob="{flag}: --faiss {index} has no such number. {fix}",
    index_two_knobs="--ef_search is for HNSW, --nprobe for IVF: give one of them",
    index_flags="--index, --ef_search and --nprobe are of an index: give --faiss",
    binary_width="--dtype binary: the vectors have {width} numbers, want a multiple of 8",
    small_questions="--dtype {dtype} is for passages",
)
VECTORS = (
    wording(
        ConfigError,
        vectors_unfinished="is not finished: run the same encode command again",
        vectors_of_other_kernels="Unset {switch}: then it goes on as it was begun",
        vectors_of_others="was begun with something else ({key} was {was!r}, is {now!r})",
        vectors_folder_taken="holds other files and no vectors of ours",
        vectors_being_written="another process is writing it",
        vectors_of_two_models="are of different models: encode both by one",
        vectors_of_other_side="holds vectors of side {side}, want {wanted}",
        vectors_absent="is missing. This folder of vectors is not there",
        vectors_dtype="--dtype {dtype}: a vector reaches {value}, {dtype_again} {most}. Use {fix}",
        states_unfinished="is not finished. Run the same",
        states_being_prepared="another process is preparing it",
        states_absent="It holds none. Run `python -m trainer prepare` with this group",
        states_of_others="It holds states with {key}={has!r} (want {wanted!r})",
        states_begun_with_other_rows="was begun with other train rows. Name a new folder",
        states_folder_taken="holds other files. Name a new folder",
        states_source="--source: the group reads data.source={source!r}",
    )
    | wording(
        DataError,
        vectors_altered="checksum {has}, want {wanted}. Delete",
        vectors_torn="cannot be read ({reason}). Delete",
        offsets_of_others="{folder}/offsets.npy is not the file that was written. {fix}, and",
        ids_of_others="{folder}/ids.txt is not the file that was written. {fix}, and",
        vectors_of_another_shape="{file} holds ({has}) {dtype}, want",
        index_torn="the index cannot be read ({reason})",
        states_altered="the checksum of its context {context} is another",
        states_size="it has {bytes} bytes, want {wanted}. Delete this file",
        states_not_prepared="no states of a context of {tokens} tokens. The data changed since they were prepared: run `python -m trainer prepare`",
    )
    | wording(
        DivergedError,
        not_finite="holds NaN or infinity",
    )
    | wording(
        StorageError,
        states_do_not_fit="{size} of states are still to be written, {free} are free",
    )
)
SETS = wording(
    DataError,
    set_columns="its columns {columns} list other records",
    set_unknown="--source {name}: no such set.",
    set_folders="holds none of the folders {names}.",
    set_split_absent="holds no .json...with {words} in its name (it has {has}",
    set_record_form="it has {has}, want {wanted},",
    set_record_kind="it is not of its publisher's form ({reason}",
    set_torn="cannot be read ...Download it again",
) | wording(
    ConfigError,
    set_place="{place}: neither a folder nor a data set",
)

# The experiment dictionary, its groups and its flags
DICTIONARY = wording(
    ConfigError,
    mistakes="{count} mistake(s)",
    value_enum="{key} is an Enum, {value}. Write its value: {plain!r}.",
    key_enum="key {key} in {place} is an Enum. Write its value: {plain!r}.",
    value_half_pair="{key}, {value!r}, holds half of a surrogate pair",
    key_half_pair="key {key!r} in {place} holds half of a surrogate pair",
    value_not_json="{key} is a {kind}, {value}. Write {fix}",
    value_not_finite="{key} is {value}. Want a finite number",
    key_not_text="key {key} in {place} is an {kind}. Write it as text: {text!r}.",
    key_with_dot="key '{key}' holds a dot, which haven refuses. {fix}",
    mix_sum="mix: the weights sum to {total}, want 1",
    mix_some_weights="'{name}' without a weight, and others with one",
    mix_weight="a weight is '{weight}', want a number from 0 to 1",
    mix_has_train="are of one source: `mix` names what is trained on",
    mix_unknown_key="'{key}' is no key of one source",
    mix_temperature="mixing.temperature is of a mix without weights",
    mix_missing="name them in `mix`, or leave it out",
    mix_change_sum="mixing.changes[{place}]: the weights sum to {total}, want 1",
    mix_change_unknown="'{name}' is no source of `mix`",
    mix_of_offer="data.mix of an offer: the uploaded rows are its source 'train.jsonl'",
    mix_of_part="mix['{name}']: ...",
    list_mixed="list '{key}' mixes dictionaries and other values",
    key_unknown="{key}: no such key.",
    both_set="{key}={value} and {other}={other_value} are both set; keep one",
    task_unknown="task={task!r} does not exist",
    value_wanted="{key}: ...Input should be {wanted}. Got {value!r}.",
    value_not_serializable="not JSON serializable. Use strings, numbers",
    key_required="{key}: required, but not given.",
    batch_above_file="batch_size={batch} is more than the {rows} rows that are trained on. Use at most {most}.",
    key_of_another_shape='shape="{shape}" does not read {key}',
    spikes_unjudged="spike_window={window} with steps={steps}: no step would be judged",
    no_end="steps is missing: give it, or epochs",
    adapters_without_record="{folder} holds adapters without a lathe.json",
    adapters_of_expressions="is a regular expression, want the name of a layer",
    base_digest="has the sha256 {got}, but base.sha256 is",
    init_from_unfit="init_from={folder!r}: none of its {count} weights fits this base",
    init_from_no_weights="it is no folder with weights. Give best/ or final/",
    init_from_adapters="with lora: adapters would belong to a base that no folder holds",
    lora_rank_beyond="lora.init=...: rank {r} of {layer} is beyond",
    lora_token_absent="lora.tokens: got {token}, but the base has embeddings for",
    lora_token_twice="stand(s) there twice; once is enough",
    lora_layers_absent="lora.layers=...: there is no block {absent}. The blocks of",
    lora_pattern_unfit="lora.patterns[{place}].match='{match}': no layer with adapters has such a name",
    lora_module_absent="lora.modules_to_save: '{module}' does not exist in",
    lora_module_shared="lora.modules_to_save: '{module}' shares its weights with",
    lora_bias_absent="has no such bias. Leave bias out",
    lora_changes_encoder="so that prepared states stay right, and this changes its weights. Leave it out",
    lora_pissa_dora="with dora: the norms of weights would be those of what is left",
    lora_moved_bits="which changes weights of the base: they need all their bits",
    goes_on_with_other="continues: this experiment is not that of run {id}: ...Put them back, or begin",
    nothing_left_to_train="with continues.step={step}: nothing is left to train",
    continue_absent="does not exist. Give the id of a run in",
    continue_length="that run counts {unit}, in which its rows have another order",
    continue_done="--steps counts from the beginning of that run. For {steps} more steps: --steps {more}",
    continue_epochs_done="are done there, and --epochs counts from the beginning",
    continue_step="holds no saved step {step}, only {saved}. Give one of them",
    continue_from="want final, best or a saved step of ...: {saved}.",
    continue_alone="want one of them. --continue takes the dictionary of that run",
    from_alone="--epochs and --from go with --continue ID",
    continues_changed="the step was saved anew since. Put the folder back",
    epochs_disagree="train.steps={steps}, but {said} are {count} steps. Leave one of the two out.",
    key_of_others="{key}: no such key. Here it is {ours}.{note}",
    batch_not_dealt="train.global_batch={global_batch} is not a multiple of micro_batch={micro_batch} x world={world} = {rows}...Use {fix}.",
    group_unknown="{group}: no such group.",
    group_not_named="{file} has 2 groups. Say which by -e: {groups}.",
    yaml_wrong="{file}:{line}: it is not YAML that is read here ({problem}",
    yaml_tab="{file}:{line}: ...YAML indents by blanks: write them for the tab.",
    groups_deep="{file}: maximum recursion depth exceeded",
    json_wrong="{file}:{line}: it is not JSON (",
    groups_kind="{file}: it holds {kind}. Want a dictionary: group -> list of experiments",
    groups_twice="{file}: stated twice in one block: {key}.",
    groups_nan="{file}: NaN is not a number that JSON knows.",
    merge_exists="--out {out}: it exists already",
    merge_without_adapters="{folder} holds a whole model and no adapters",
    new_file_exists="{file} exists already. Give another name by --out",
    text_empty="{key}: String should have at least 1 character",
    tuple_empty="{key}: Tuple should have at least 1 item",
    base_lacks_weights="base={source!r}: its files lack {names}, and here no training fills",
    rank_outside_world="0 <= rank < world",
    device_unknown="--device {device}: neither a size...nor a known name",
    answers_of_source='source={source!r} has no answers. Use source="files"',
    flag_value="{flag}={value}: want no value. Write {flag_again} alone",
    entity_alone="{flag} and {other}: got the entity alone",
    tracker_unknown="{tracker!r} does not exist.",
    best_is_unknown="train.best='{metric}': got no train.best_is",
    best_is_of_several="best_is={best_is} with {count} metrics: say it by name",
    best_is_strange="best_is: {names} is not in best=",
    best_of_no_set="train.best={best!r}: data.valid_sets has no {name!r}.",
    best_is_turned="--strict: train.best_is={stated!r}: {metric} is better when it is {better}",
    own_metric_fails="metrics={spec!r}: tried on...validation rows, it {what}; want a dictionary",
    own_metric_absent="{path}: there is no such file; want the name of a file and of a function",
    own_metric_undefined="defines no function {name!r}.",
    own_metric_unreadable="{path}:{line}:...Mend that line.",
    sets_of_no_files="valid_sets are files, and source={source!r} has none",
    own_metric_unanswered="got no row to answer, want some",
    own_metric_of_task="task {task!r} writes no answers in its evaluations",
    test_of_no_file="test=True with data.files.test={file!r}: want the whole path",
)
API = (
    wording(
        # texts of a KeyboardInterrupt
        interrupt_saved="{signal}: the run is stopped after step {step} of {total}, and saved in {folder}. The same call",
        interrupt_left="left without saving. The same call",
    )
    | wording(
        ConfigError,
        argument_unknown="{name}=...: there is no such flag.",
        argument_kind="{name}={value!r}: want a value of type {kind}.",
        argument_path="{name}={value!r}: want a path.",
        argument_least="{name}={value!r}: want at least {least}.",
        experiment_wanted="the experiment is a {kind}, want its dictionary",
        count_wanted="{name}={value!r}: want a whole number of at least 1",
        thread_of_api="fine_tune: it was called in another thread than the main one",
        launcher_of_api="fine_tune: {names} is set, but fine_tune starts its ranks itself.",
        group_of_api="fine_tune: torch.distributed has a process group already",
        list_of_experiments="submit: want a list of experiments",
        backend_unknown="-j {name}: there is no such backend",
        experiments_equal="-e {group}: some of its experiments are the same",
        run_folder_absent="{folder}: there is no such folder (...). Give results/",
        metrics_absent="{folder} has no metrics.jsonl",
        nothing_to_draw="has no line yet",
        answer_reads_no_contexts="answer: a language model reads no contexts",
        answer_reads_text="answer: got messages, and this model reads one question",
    )
    | wording(
        DataError,
        row_kind="rows, row {row} is a {kind}, want a dictionary",
        row_not_json="rows, row {row} holds what JSON cannot",
    )
)
COLUMNS = wording(
    ConfigError,
    columns_unknown="columns: {column!r} is no field of source={source!r}....ours are {ours}",
    format_unread="format={format!r} holds {holds}; this task reads {wanted}. {fix}",
    format_beside_source="format={format!r} with source={source!r}, which says what its rows look like",
    format_of_own_files="format={format!r} has files with names and columns of their own: leave out {keys}",
    format_says_columns="format={format!r} says what its columns are called: leave {keys} out",
    format_without_answers="format={format!r} has no answers. Use",
    columns_without_from='columns.{name}: no "from", which is the column of the list',
    columns_key_unknown="columns.{name}: {key!r} is no key of its objects.",
    columns_no_objects="columns: {name!r} is no list of objects here, {which}: write the name of a column, {fix}",
    column_key_absent="data.columns.{name}: {key!r} is {column!r}, which no object of {list!r} has in {place}.",
    columns_of_one_thing="columns: {one} and {other} are names of one thing",
    column_absent="'{key}': {column!r} is no column.",
    columns_there="Columns there: {columns}.",
    columns_named_twice="columns maps {column}, which {keys} names as well: name it in one place",
    source_reads_no_rows="source={source!r} reads no rows of your own: leave out {keys}.",
    source_names_no_files="source={source!r} names no files",
    keys_of_a_set="{keys} are of a data set",
    share_beside_split="name no valid split",
    loss_of_chat="has its loss on what the assistant says",
    source_without_conversations="has no conversations",
    one_task_of_files="is one task, got {tasks}:",
    dataset_unnamed="source={source!r} with dataset=None: say which",
    dataset_beside_files="source={source!r} with dataset={dataset!r}: leave it out",
    dataset_of_hub='dataset belongs to source="hub"',
    negatives_of_beir='negatives belongs to source="beir"',
    prefix_of_token_ids="token ids take no prefix",
)
GROUPS = wording(
    ConfigError,
    python_file_fails="{file}:{line}: {error}",
    python_file_wanted="{flag} ...; want the path of a Python file (.py)",
    value_near="{key}: Input should be ... Got {value!r}. Did you mean {near!r}?",
    group_required="-e/--exp_group is required: ...`lathe train FILE` takes a file of your own",
    secret_in_dictionary="{place}: got what looks like the key of a service. A key of",
    secret_name="{name}: no such key. A key of a service stands in no dictionary",
    wandb_key_for_name="--wandb_{flag}_name: got what looks like a key, want a name",
    group_file_unreadable="it cannot be read (...). Give the path of a file of groups",
    group_of_several="-e {group} has {count} experiments. Say which by --exp_id:...{entries}",
    file_not_first="lathe {command}: got {word!r}. One file of groups",
    dictionary_wanted="{name} is {kind}. Want a dictionary...{entries}.",
    group_kind="{name} is a {kind}. Want a list of experiments, or a dictionary",
    group_empty="{name} is an empty list. Want at least one",
    group_name="{name} is named by an {kind}. Want a string",
    axis_empty="{key}: an empty list is an axis without values...[[]]",
    schema_of_whole_dictionary="--json_schema is of the whole dictionary",
    flag_choice="{flag}: want {choices}",
    one_form_of_output="keep one.",
    task_without="task {task!r} has nothing to {what}.",
    run_would_be_refused="a run would be refused",
    group_wanted="a group's name is wanted",
    group_of_an_id="-e {group} --exp_id {id}",
    job_group_name="{name}: want the name of a group, a string",
    job_key_name="{name}: {key} is no key, want a string",
    job_accounts="EAI_ACCOUNT_ID_TO_USER: want a dictionary: account id -> user",
    job_account_unknown="EAI_ACCOUNT_ID={account} is not in EAI_ACCOUNT_ID_TO_USER ({known})",
)
DEEPSPEED = wording(
    ConfigError,
    deepspeed_file_unknown="deepspeed={name!r}: there is no file...Use one of {choices}",
    deepspeed_file_unreadable="not a DeepSpeed file: {reason}",
    deepspeed_file_kind="holds a {kind}. Want one JSON object",
    deepspeed_key_unknown="{key}: no such key in DeepSpeed",
    deepspeed_key_place="It belongs {place}.",
    deepspeed_value="{key}={value}: want {wanted}",
    deepspeed_auto='{key}="auto": nothing in the experiment decides it',
    deepspeed_auto_of_hidden_size='{key}="auto" needs the hidden size of the base',
    deepspeed_window="{key}=true: ...the loop decides when a window ends",
    deepspeed_window_of_compile="decides where a window ends",
    deepspeed_mean="for the mean over ranks",
    deepspeed_norm_watched="watched for NaN",
    deepspeed_key_gone="no longer has it",
    deepspeed_wandb="wandb run already",
    deepspeed_differs="{theirs} in the file, but {ours}",
    deepspeed_both_precisions="{key} and {other} are both true",
    deepspeed_optimizer="optimizer.type={value}: the engine makes AdamW itself",
    deepspeed_l2_decay="optimizer.params.adam_w_mode=false is Adam with L2 decay",
    deepspeed_schedule="the loop owns the schedule",
    sharing_of_ranks="sequence_parallel_size={count} does not divide {ranks} rank(s)",
    sharing_compiled="train.compile=true with sequence_parallel_size={count}",
    sharing_of_fastest="--fastest with sequence_parallel_size={count}",
    sharing_of_run="sequence_parallel_size={count} in the DeepSpeed file: {reason}. Only task",
    sharing_of_heads="sequence_parallel_size={count} does not divide the {heads} attention heads",
    sharing_of_padded="sequence_parallel_size={count}: the base reads no streams of tokens",
    sharing_of_rotations="sequence_parallel_size={count}: the base has rope_type {types}, whose",
    deepspeed_stage="{key} needs stage {wanted} or more, got stage={stage}:",
    deepspeed_stage_3="{key} needs stage 3, got stage={stage}.",
    offload_device="device={device!r}: want none, cpu or nvme",
    nvme_path_absent="{key}.nvme_path={path!r} is not a folder",
    stage_of_overlap="overlap_comm=true needs stage 2 or 3, got stage={stage}:",
    stage_of_fp16="train.precision='fp16' needs ZeRO stage 1, 2 or 3, got stage={stage}:",
    stage_of_gradient_dtype="grad_accum_dtype={dtype!r} needs stage 1 or more",
    hpz_of_ranks="{key} does not divide {world} ranks",
    deepspeed_optimizer_twice="{key}={value!r}. Delete the block",
    average_steps_gone="--last {last}: {run} has ... to average; train.keep_last={kept} removes older ones. Use --last {fewer}, or train with train.keep_last={more}",
    average_shape="{name} has shape {got}, want {want}",
    average_config="config.json: {key} is {got}, want",
    average_adapters="adapter_config.json: {key} is ...want None",
    average_base="trained beside the frozen base {base}, want",
    average_sum="--weights: got a sum of",
    average_count="--weights: got 1 for 2 folders",
    average_negative="--weights: got {got}, want numbers above 0",
    average_words="want numbers, such as 0.7,0.3",
    average_last_of_many="got 2 folders, want the folder of one run",
    average_of_one="one model has no average",
    terms_without_vocabulary="train.{key}: the loss of task '{task}' is over no vocabulary",
    average_on_nvme="train.ema={value}: the weights that it averages are on NVMe",
    stage_of_adafactor="optim.name='adafactor' needs ZeRO stage 0, got stage={stage}:",
    stage_of_compile="train.compile=true needs ZeRO stage 0, 1 or 2, got stage={stage}:",
    stage_of_base_bits="train.base_bits={bits} needs ZeRO stage 0, 1 or 2, got stage={stage}:",
    adafactor_keys="no betas and no eps",
    optimizer_keys="leave out what only others read",
    optimizer_on_host="optim.name={name!r} is stepped on the device alone",
    nesterov_alone="nesterov=true without momentum",
    rate_group_idle="changes nothing: give it lr or weight_decay",
    pattern_idle='{key}: match="{pattern}" names none of the ...{near}',
    no_blocks_to_decay="optim.layer_decay: the model has no stack of blocks",
    freeze_of_no_step="no step would be left out",
    freeze_on_host="train.freeze: a since above 0 needs the optimizer on the device",
    freeze_of_everything="train.freeze: nothing would train in step {step}",
    offload_of_nothing="train.activation_offload=true without train.gradient_checkpointing",
    offload_to_native_memory="DeepSpeed's pinned memory is free again",
    offload_of_named_input="blocks of this base are given their input by name",
    deepspeed_own_recomputation="cpu_checkpointing: it is for DeepSpeed's own recomputation",
    freeze_too_late="it would never stand still",
    environment_missing="{names} is not. Start with torchrun",
)

# Models: bases, tokenizers, weights, adapters
BASES = wording(
    ConfigError,
    code_refused="code of its own (auto_map), which is never run",
    pickle_refused="a pickle of more than tensors, which could run code",
    pickle_of_others_refused="refused....it asks for {name})",
    weights_absent="holds no weights, want {files}",
    weights_of_two_values="different tensors for one shared parameter: [{names}]",
    weights_of_another_shape="{name} (got {got!r}, want {wanted!r})",
    weights_missing="missing [{names}]",
    weights_unexpected="unexpected [{names}]",
    weights_unfit="{source} does not fit {model}:",
    weights_unreadable="its weights cannot be read (",
    index_leads_out="{index} lists {file}, outside of its folder",
    index_unreadable="{index} cannot be read ({reason}), want...weight_map",
    template_endless="data.chat_template: the chat template {template} calls itself without an end",
    weights_not_finite="{happened}, because weights are not:",
    weight_not_finite="{name} holds NaN (no number)",
    weight_too_large="{name} holds numbers that {dtype} cannot",
    base_packed_already="has a quantization_config ({method})...{key}",
    base_without_weights="the folder holds a config.json and no weights",
    base_pickle="its pytorch_model.bin is not tensors alone",
    package_folder_absent="holds no folder",
    package_name="no name of a package",
    digest_of_file_differs="have the sha256 {has}, but the experiment...{stated}",
    wordnet_missing="Get it: python -m nltk.downloader wordnet.",
    nothing_to_train="none of the {count} parameters of {model} was chosen",
    base_of_another_kind="base: got model_type {family!r}, {kind}, want {wanted}, such as...Choose such a base{advice}.",
    base_without_vocabulary="base: got model_type {family!r}, which has no vocabulary, want a language model",
    family_unknown="got model_type {family!r}, want one of {families}",
    family_of_adapted="base.adapted: a {family} ...want a {wanted}.",
    family_of_summaries="a {family}, want one of the T5 families",
    family_reads_pictures="got a {family}, of which a part reads pictures",
    package_absent="the package {package} is not installed",
    digest_differs="its weights ({file} and {more} more) have the sha256",
    digest_of_hub="a digest goes with a folder or a package, not with a Hub id",
    digest_of_nothing="the folder itself holds no weights that a digest could be of",
    model_absent="is neither a folder with config.json nor a model",
    base_absent="base={base!r}: {problem}. Give the folder that holds config.json",
    base_absent_on_hub="base={base!r}...nor a model that the Hub gives out",
    tokenizer_below_data_path="it is also looked for below --data_path, which was not given",
    model_absent_on_hub="{model!r} is neither a folder nor a model",
    model_folder_absent="neither a run folder with best/ or final/ in it",
    base_run_unfinished="has not finished",
    base_run_without_best="{folder} holds no model, for no evaluation of that run",
    model_random="random weights and no folder",
    tokenizer_unloadable="tokenizer={tokenizer!r} cannot be loaded (tried {places}): {reason}",
    tokenizer_without_end="no end-of-text token",
    ids_above_embeddings="has ids up to {largest}, the base only {embeddings} embeddings....at least {wanted}.",
    fp16_of_t5="pass 65,504, the largest number of fp16, and become NaN...Use 'bf16'",
    end_differs="base.config.eos_token_id={id}, ...summaries would never end",
    extra_not_installed="{name} is not installed....pip install -e '.[{extra}]'",
    module_not_installed="No module named {name!r}. Install it: pip install -e '.[{extra}]'",
    package_of_backend="needs Ray. pip install -e '.[{extra}]'",
    generation_file_tokens="generation_config.json...Mend the file",
    token_out="got the token {token}, want 0 to {most}",
    ids_of_no_text="got ids that this model's tokenizer gives for no text",
    schema_beyond="the schema cannot be held: {reason}. Simplify that part",
    tools_unwritten="the chat template of this model writes no tools",
    message_unwritten="message {number}: this model's chat template writes nothing of it",
    prompt_length_wanted="the prompt has {count} tokens, want 1 to {most}",
    positions_taken="{most} tokens to generate: the model has {positions} positions, which leaves none",
    question_shortened="{why}: this is one of them. Ask a shorter question",
)
ADAPTERS = wording(
    ConfigError,
    targets_unknown='lora.targets={targets!r}: there is no {target!r}...The linear layers of a {family} are {layers}. ..."all-linear"',
    parts_merged='lora.parts={parts} with lora.export="merged": the output layer',
    output_unmerged="the output layer has adapters, and shares its matrix with",
    targets_shared='lora.targets={targets!r}: {target!r} shares its matrix with the embedding..."all-linear"',
    targets_not_linear='lora.targets={targets!r}: {target!r} is no linear layer but a {kind}...."all-linear"',
    targets_kind='lora.targets: Value error, ..."all-linear"',
    adapters_of_other_base="adapters were trained on base {base}...Put the old base back",
    adapters_of_another_kind="{says}, which makes adapters of another kind...want adapters of one rank",
    adapters_as_base="holds adapters without their base, {because}.{fix}",
    adapters_merged_before_encoding='lora.export="merged": contexts are encoded..."adapter"',
    layers_with_adapters="init_from={folder!r}: its layers were trained with adapters...State lora",
    base_bits_of_trained="train.base_bits={bits}: the weights of the base train",
    precision_of_fp8='train.base_bits="fp8" with train.precision="{precision}"',
    shape_of_fp8="got the layer {layer} ({rows} x {columns}) and {more} more, want sides that are multiples",
    device_of_fp8="{device} does not multiply FP8 with torch...({reason})",
    gpu_of_fp8="train.base_bits='fp8' on {name}: it multiplies no FP8",
) | wording(
    ResumeError,
    layers_of_other_base="were trained on base {base}, but ...Put the old base back",
)

# Tasks
CROSS_ATTENTION = wording(
    ConfigError,
    layers_above_blocks="layers.count={count} x layers.stride={stride} = {blocks} blocks: the base has {has},...Use layers.count <= {most},",
    heads_of_width="layers.{key}={value} does not divide layers.{other}={other_value}...Use one of {choices}.",
    tokens_above_positions="{key}={value}: the base has {positions} positions",
    layers_of_family="{keys}: the layers of a {family} base have no such thing",
    head_width_odd="is {width} numbers a head: rotary positions turn pairs",
    heads_of_base="layers.heads={heads}: layers.base_attention takes the base's {has}.",
    shared_weights_differ="layers.shared_weights=True wants one layer in every slot",
    cross_attention_weights_absent="without any cross_attn_layers",
    prompts_padded_right="padded on the right",
    contexts_for_rows="got {rows} rows for {contexts} contexts",
    answers_without_context="--another_context: task {task!r} answers from no context",
    temperature_wanted="--temperature {value}: want a number above 0",
    share_wanted="--top_p {value}: want a share between 0 and 1",
    cut_at_nothing='--cut_at "": got an empty text',
    answer_texts_wanted="answer: got {value!r} in {name}, want texts that are not empty",
    question_holds_half="answer: got...half of a surrogate pair",
    top_p_without_draws="--top_p {top_p} says what is drawn from, but nothing is",
    draws_beside_beams="--temperature draws, --num_beams {num_beams} searches",
    measure_unknown="--measure {measure}: no such measure.",
    packed_attention="data.packed=True: the base's attention is {attention!r}, want {wanted!r}",
)
FID = wording(
    ConfigError,
    reader_not_t5_config="got no folder with config.json",
    reader_unreadable="cannot be read ({reason}). Copy the",
    reader_family="got model_type={family!r}, want {wanted!r}",
    reader_config_describes_none="describes no T5",
    reader_layout_unknown="--layout {layout}: no such layout of a reader.",
    minfid_pickle="want a pickle of {'sd', 'args'}",
    minfid_values="something else than tensors by name",
    minfid_sizes="its sizes cannot be told",
    cross_bias_absent="holds no {name}: there is nothing to keep",
    flex_without_cuda="trains on CUDA only",
    fido_reader="got a FiDO reader",
    fido_trained_otherwise="got a reader that was trained with cross_attention_every={every}, cross_attention_multi_query={multi_query}, want one with cross_attention_every",
    fido_weights_missing="needs weights that are not there",
    fido_every_above_blocks="reader.cross_attention_every={every}, but the decoder of the base has {blocks} blocks",
    fido_under_adapters="want a base that has them: weights under adapters",
    fido_family="got a base of model_type {family!r}, want {wanted!r}",
    fido_cross_bias="whose cross-attention is whole",
    model_folder_unknown="--model {model}: no such folder",
    answers_above_beams="--num_answers {num_answers} with --num_beams {num_beams}...Use --num_beams {fix} or more",
    not_trained_yet="holds no {model}/ folder. Train it first",
    scores_without_passages="--write_scores: task {task!r} reads no passages",
)
RETRIEVER = wording(
    ConfigError,
    pooling_of_decoder="pooling={pooling}: in a decoder",
    projection_width="in_width={width}, but the base's states have {has}.",
    pooler_absent="holds no pooler.pt",
    limit_without_room="data.{side}_tokens={limit}: got no room for a text...want at least {least}.",
    retriever_absent="holds neither config.json nor adapter_config.json",
    matryoshka_width="loss.matryoshka.dims: got {got}, but the vectors of this model have {has} numbers",
    matryoshka_weights="got {got} weights, want one for each of",
    matryoshka_twice="got one of them twice, want each once",
    nested_in_nothing="got neither dims nor layers",
    layers_beyond_base="got {got}, but the base has {blocks} blocks, want at most {most}",
    layers_unheard="the blocks of a {family} are not listened to one by one",
    layers_compiled="loss.matryoshka.layers with train.compile, whose blocks are not listened to",
    chunks_of_two_kinds="chunk_tokens={tokens} with query_chunk={queries} and passage_chunk={passages}",
    chunks_without_device='loss.chunk_tokens="auto" needs to know the device',
    dims_of_vectors="--dims {dims}: got vectors of {has} numbers",
    triplet_without_margin="got margin=0, want one above 0",
    triplet_alone="compares a query with its own passages alone, so that {key} has no meaning",
    triplet_without_negatives="got data.passages={passages} with data.positives={positives}, want more",
    false_negatives_of_nothing="got none of above, margin and share",
    positives_above_passages="positives={positives} of passages={passages}: want at most all",
    teacher_without_scores="loss.{asks}: ...has no scores of a teacher",
    ranking_head_absent="{folder} holds no head (head.safetensors, or in its weights)",
    export_of_other_form='{folder} holds a retriever of form="{form}"',
    mteb_rows_without_texts="--mteb: got rows of {keys}, and the model reads texts",
    mteb_compares_vectors='--mteb {task}: it compares one vector of each text, and form="{form}" makes none',
    base_of_other_form='base: {folder} was trained as form="{form}"',
    head_lost='{folder} was exported as form="{form}" ...and its head is not there',
    tokenizer_of_other_export="{folder}: its tokenizer has {there} tokens, and that of this experiment",
    projection_without_weights="base: {folder} projects its vectors, and {place} holds no model.safetensors",
    topics_of_no_vectors='.topics.by="model" clusters a vector of each query, and form="{form}" makes none',
    block_of_other_form='{block}: form="{form}" does not read it',
    vectors_of_two_forms='holds vectors of form="late", ...of form="bi", which no search compares',
    index_of_token_vectors="--faiss searches one vector of each text",
    late_matryoshka='loss.matryoshka: form="late" has no vector of a whole text',
    late_chunk_tokens='loss.chunk_tokens: form="late" cuts micro-batches by texts alone',
    late_without_negatives='form="late" is validated on each query\'s own passages',
    attend_without_expand="attend=true without expand has no mask tokens",
    another_projection="late.width={width}: got a base, ...whose projection makes vectors of {there}",
    wider_than_states="late.width: got {width}, but the states of this model have {states} numbers",
    query_beyond_positions="data.query_tokens={tokens}: late.expand makes every query so long, longer than the model's {positions} positions",
    no_such_token="late.skip: '{word}' is no token of",
    late_config_torn="{folder}/late_config.json: ...Export the model again.",
    projection_of_another_kind="base: {folder} projects its vectors with ('bias', True), want a single linear layer",
    matryoshka_of_words='loss.matryoshka: form="sparse" makes weights of words',
    regulariser_of_tokens='{key}: got it with queries="tokens"',
    base_fills_no_masks="got model_type '{family}', which has no masked-LM head",
    masked_lm_head_absent="base='{base}': its files hold a body without its masked-LM head",
    adapters_in_output="got adapters in the output layer of the base",
    sparse_export_absent="...Want the folder of a sparse retriever",
    flag_of_other_form='{flag} is for models of form="{form}", this one is of form="{own}"',
    dtype_of_words='--dtype {dtype}: want float16 or float32 for a model of form="sparse"',
    words_of_two_widths="weights of {width} and of {other} words",
    list_of_one='form="cross" learns scores from positives beside negatives: got data.passages={passages}',
    recomputes_no_blocks="computes no blocks of model_type '{family}' again",
    base_without_head="got model_type '{family}', which has no head",
    pairs_beyond_positions="pairs of {tokens} tokens, longer than the model's {positions} positions",
    scores_no_pairs="task {task!r} scores no pairs",
    rerank_source="give --run or --rows, one of them",
    rerank_two_kinds="got {flags} with --rows, whose rows hold their own questions and passages",
    rerank_texts="give --queries and --passages, too",
) | wording(
    DataError,
    text_without_tokens="a {side} has no token, for {tokenizer!r} knows nothing in its text",
    scores_of_passages="want a number for each of the row's ...passages, positives first",
    score_of_no_float32="question {question!r}, passage {passage!r}: the score is ...which no float32 holds",
    scores_are_ranks="has ranks, and a teacher gives scores",
    no_teacher_scores="no passage of the training rows has a score of a teacher",
    passages_to_score_absent="want passages to score",
    row_without_passages="want positive_passages and negative_passages",
)
BATCHES = wording(
    ConfigError,
    batches_say_nothing="data.batches says nothing",
    batches_without_negatives="data.batches puts rows together that are each other's negatives",
    one_source_of_no_mix='data.batches.source="one" is of a mix',
    vectors_untrained="{flag}: loss.matryoshka.{key} of this experiment is {is_}, so that vectors",
    topics_of_a_mix="data.batches.topics of a mix: a step has one topic",
    batches_and_order="data.batches and train.{key} both say which rows a step has",
    source_without_topics="the rows of {source} say no topic",
    field_with_clusters='by="field" forms no clusters',
    model_of_topics_unread='by="{by}" reads no model',
    topics_model_absent="data.batches.topics.model: there is no folder {folder}. Give",
    topics_other_tokenizer="has another tokenizer than this experiment, whose tokens it would read",
    clusters_above_rows="clusters={got}: got more clusters than the {rows} training rows",
) | wording(
    DataError,
    step_of_distinct_rows="got a step of {want} rows for which the data have only {got} without",
    topic_kind='query {id!r}: got {kind} as "topic", want a text or a number',
    row_without_topic="query {id!r} has no ...topic",
)
SUMMARISER = wording(
    ConfigError,
    draws_no_summaries="draws no summaries. Leave out {flag}.",
)
VERA = (
    wording(
        ConfigError,
        head_absent="holds no head.safetensors, so it is no trained verifier",
        t5_encoder_absent="holds no T5 encoder",
        vera_pickle="want a pickle of {'model', 'linear', 'step', 'eval_accs'}",
        plain_t5="This is a plain T5",
        verifier_vocabulary="a t5 of more than {ids}",
        variant_unknown="{task} has no variant {variant}. Use one of {choices}.",
        variant_form="--variant {variant}: want NAME=VALUE",
        declarer_unknown="--declarer {declarer}: no such declarer",
        conversion_unknown="no data set is called {dataset!r}.",
        conversion_task_required="--task NAME is required",
        conversion_split_of_one_file="one file, and a split is",
        conversion_split_required="Say by --split which split it is",
        conversion_running="is being written by another conversion",
        converter_unloadable="--converter {model}: cannot be loaded",
        task_of_no_set="'{task}' is none of the tasks that are trained on or evaluated.",
        task_listed_twice="{key}: {task} stands there twice",
        order_legacy='set train.order="as_given"',
        loss_mode="leave both out",
    )
    | wording(
        DataError,
        rows_give_no_group="{bad} of {count} rows give no group:\n  {first}",
        task_files_absent="holds no split of {task} ({files})",
        task_file_absent="lacks {file} of the {split} split",
        converter_needed="needs a question converter",
        label_lines="has {lines} lines for {rows} of {file}.",
        group_golds="{count} golds, ",
        group_without_gold="no gold, but its task is multiple-choice",
        group_gold_blank="{key} is {value!r}; want a list of texts that are not blank",
        group_kind_of_json="want an object with golds and distractors",
        task_data_absent="Task {task!r} of data.{key} wants it: make it with `python -m trainer convert {task_again}",
        task_data_absent_perhaps="Task {task!r} of data.{key} wants it: make it with ...if that command knows this set",
    )
    | wording(
        BadRecord,
        problem_without_tab="no tab",
        problem_yes_or_no="want yes or no",
        problem_blank="the question is blank",
        problem_options="the options are {options!r}, want (A)",
        problem_answer="the answer {answer!r} is none of the options {options!r}",
        problem_option_count="{count} option(s), want two or more",
        problem_parts="{count} parts with",
    )
    | wording(
        DivergedError,
        verifier_logits_not_finite="{bad} of {count} logits are not finite; the first is {value}, of task {task!r}, problem {problem}, column {column}.",
    )
)

# Training and its checkpoints
TRAINING = (
    wording(
        ConfigError,
        checkpointing_without_device="needs to know the device...or say true, false or a",
        checkpointing_above_blocks="gradient_checkpointing={value}: the base has {blocks} blocks",
        run_alive_by_hand="started by hand",
        replay_absent="no replay on {world} rank(s) behind step {step}.",
        export_not_needed="nothing is to be done",
        evals_above_positions="Use at most {most} ({key})",
        evals_without_generation="task {task!r} cannot answer questions by generation",
        silence_wanted="LATHE_SILENCE_S={value!r}: want the seconds",
        survive_form="--survive {value!r}: want RANKS or RANKS",
        survive_with_torchrun="not with torchrun",
    )
    | wording(
        LatheError,
        survive_in_vain="{times} times in a row a rank was lost",
        survive_every_rank_lost="every rank is lost",
    )
    | wording(
        DoesNotFitError,
        survive_memory="12 bytes a trained parameter, twice",
    )
)
CHECKPOINTS = (
    wording(
        CheckpointError,
        elements_missing="elements of {name!r} are missing or stand there twice",
        shards_missing="got weights shards {shards}; want one of every rank",
        tensor_twice="{name!r} is in an earlier shard",
        rank_state_missing="there is none of rank {rank}.",
        checkpoint_unreadable="{reason}. Use another checkpoint",
        random_state_unfit="random state...{name}",
    )
    | wording(
        StorageError,
        checkpoint_does_not_fit="{free} free, the checkpoint needs {needs}. Free some space",
        checkpoint_not_saved="step-{step} was not saved. Rank {rank}: ...{place}: {reason}.",
        checkpoint_file_unseen="got {got} bytes, want {wanted}. Do all machines see the same folder",
    )
    | wording(
        ResumeError,
        run_of_others="{file} is of another experiment",
        mix_grown="'{name}' of train (had {had} rows, has {has})",
        run_file_unfit="{file}: got ...; want",
        kernels_changed="the run began with {switch}={was} and here it is {now}: losses",
        run_changed="changed since the run began: {key} (was {was}",
    )
)
PEERS = wording(
    RankLostError,
    rank_silent="rank {rank} (process {process}) has not been heard of since{fix}",
    rank_ended="rank {rank} (process {process}) ended without a word",
)
PLAN = (
    wording(
        blocks_differ="{blocks}: two blocks in its middle",
        blocks_out_of_order="entered in the order {order}",
    )
    | wording(
        ConfigError,
        calibration_unreadable="it is no calibration of a device",
        calibration_version="a calibration of version {version}, want {wanted}.",
        calibration_of_other_machine="a calibration of another machine...: its {key} is {value!r}",
        device_counts="{device} with --nodes {nodes} are {devices} devices, and --world is {world}.",
        device_kinds="devices of several kinds",
        device_none="no device at all",
        device_count_of_job="{devices} devices, and the job has {processes} process(es)",
        devices_over_nodes="cannot be spread evenly",
    )
    | wording(
        MeasuringError,
        measuring_ended="exit code {exit_code}",
    )
)

# Jobs
JOBS = (
    wording(
        ConfigError,
        job_keys_unknown_to="{backend} knows no {keys}. Remove them",
        job_key_unknown_to="the {backend} backend does not know {key}. Remove",
        export_kind="no such kind.",
        sky_gpu_model="{key}: {value!r}, want the name of a GPU",
        older_than_days="older_than_days={value}, want 0 or more",
        haven_command="command {command!r} in {folder}: want LAUNCH_LINE FILE.py --exp_id ID",
        haven_savedir="savedir {folder}: the id of this experiment is {id}.",
        haven_steps="steps={steps}: the schedule depends on it",
        token_wanted="token {token!r}: want at most",
        backend_cannot_wait="after={after!r}: the {backend} backend cannot wait",
        image_required="image: required",
        image_form="image: {value!r} is no image reference",
        dns_label="{key}: {value!r} is no DNS label",
        object_name="{key}: {value!r} is no name of an object",
        secret_form='{key}: {value!r}, want "NAME/KEY" of a Secret',
        volume_form='volumes: {value!r}, want "<claim>:/mount"',
        environment_twice="environment_vars: Value error, {names}: several values, want one each",
        volume_twice="volumes: {value!r} is mounted twice",
        folder_below_no_mount="{key}: {value!r} lies below no mount of `volumes`",
        nodes_of_ray="nodes: {nodes}, but a Ray job's entry point has one node",
        address_form="address: {value!r}, want the dashboard's",
        wrapper_form="wrapper: {value!r}, want the argv",
        gpu_model_of_slurm="resources.gpu_model={value!r}: ask by gres",
        k8s_id="{id!r} is no id of the k8s backend",
        key_file_mode="mode {mode}, want 0600: chmod 600",
        key_file_lines="want one line",
        key_file_absent="{reason}. Write the key to it, and: chmod 600",
        key_file_owner="owned by user {user},",
        key_file_kind="not a regular file",
        python_binary="--python_binary {value!r}: ",
        launch_line_page="Modules, containers, conda run and uv: docs/launch-line.md",
        gres_form="want NAME[:TYPE][:COUNT], several with a comma",
        gres_sockets="is how scontrol shows the sockets of a node, and sbatch refuses it. Write {instead!r}",
        sbatch_exclusive="{key}: no such key. A job gets the cores, memory and GPUs that it asks for",
        sbatch_ntasks="{key}: no such key. ...torchrun starts the ranks",
        script_control_character="{value!r} holds a control character, which a batch script cannot carry",
        launcher_of_nodes="nodes={nodes}: {launcher!r} cannot start on several nodes. Use torchrun",
        queue_cpus="LATHE_QUEUE_CPUS={value}: want ...1 or more...unset it",
        job_is_queued="{id} is {state} as {job}. `cancel` it first",
        array_differs="differ in {keys}. Submit them apart",
        toolkit_nodes="nodes={nodes}: jobs of several nodes",
        toolkit_image="image: a job is a container",
        toolkit_max_run_time="max_run_time={value}: a job that is neither preemptable nor restartable has at most {most} s",
        toolkit_mount_form="data {value!r}: want NAME:/mount",
        toolkit_no_writable_mount="{folder} is in no mount of `data` that can be written",
        toolkit_after="after={after!r}: Toolkit has no dependencies",
        toolkit_secret="{name} looks like a secret",
        toolkit_file_unseen="{file} is in no mount of `data`: the job",
        toolkit_secret_mount="wandb_key_secret={value!r} is a mount: wandb_key_file must name the file in it. Got {got!r}",
    )
    | wording(
        LatheError,
        rendezvous_port_taken="port {port} of {host}, where the nodes of this job meet, is taken. `retry` sends",
    )
    | wording(
        Refused,
        program_not_on_path="{program} is not on PATH",
        object_not_ours="exists and is not ours",
        jobset_wanted="Several nodes need JobSet",
    )
    | wording(
        Unreachable,
        cluster_not_configured="no cluster is configured: ...Set KUBECONFIG",
        submission_unknown="{reason}. Whether the job exists is not known: look for its name",
        toolkit_answer="want one JSON object with an id in a line, got {got!r}",
        toolkit_tried="{reason}. Tried for",
        ray_address_set="RAY_ADDRESS...Unset it",
        ray_did_not_answer="the Ray cluster did not answer",
        queue_of_other_host="the queue {queue} belongs to {host},",
        queue_seen_elsewhere="jobs of the queue {queue} of {host} can only be seen there",
        backend_silent="{backend} has not answered for",
        backend_gave_no_answer="{who} did not answer within",
        backend_gave_none_of_many="{who} has not answered {count} requests",
    )
    | wording(
        Refused,
        Unreachable,
        scheduler_says="{words}",
        eai_not_run="eai cannot be run",
    )
    | wording(
        NothingMatched,
        attempt_unknown="has no attempt {attempt}. It has {has}.",
        never_submitted="{id} was never submitted",
    )
    | wording(
        LatheError,
        queue_folder="Name a folder of this machine",
    )
    | wording(
        Busy,
        lock_busy="another process {held} this",
    )
)
SUBMISSION = wording(
    ConfigError,
    rate_odd="--strict: optim.lr={lr}: a step of {name} moves a weight {how}, want between 1e-09 and {highest}.",
    mix_change_late="data.mixing.changes[0]: after={after}, and the run has {steps} steps: these weights are never used.",
    warmup_too_long="schedule.warmup_steps={warmup} is longer than the run of train.steps={steps}",
    best_not_of_validation="train.best={best!r}: evaluations are of the validation split",
    tokenizer_nowhere="there is no such folder, neither here nor below --data_path ({data})",
    init_from_absent="init_from={folder!r}: there is no such folder here",
    survive_on_nvme="--survive: got an optimizer offloaded to NVMe",
    relative_unseen="{names}: relative to {here}, which the job's node may not see",
) | wording(
    StorageError,
    run_folder_leads_out="{folder}: it is a link to {target}, outside of --savedir_base",
)
SNAPSHOTS = (
    wording(
        ConfigError,
        tree_dirty="{count} file(s) differ from {commit}: {files}. Commit them...--allow-dirty",
        tree_altered="{count} file(s) differ from {version} as it was installed: {files}. Install it again...--allow-dirty",
        tree_without_git="not in a git repository",
        tree_empty="no file to take",
        tree_holds_secret="would hold a secret: {file}, line {line}: {what}....{fix}",
        savedir_is_project="Give it a folder of its own",
        tree_file_too_big="{file} ({size}); want at most {most} each....gitignore",
        tree_too_big="a code snapshot of {size}, want at most {most}. The largest: {files},",
        tree_unreadable="{file}: {reason}",
        git_refuses="git rev-parse says",
        digest_form="want 64 hexadecimal digits",
    )
    | wording(
        Transient,
        git_slow="git {command} in {folder} took over {seconds} s",
        tree_changes="{folder}: files change while they are copied",
    )
    | wording(
        StorageError,
        code_is_folder="Move the folder away",
    )
)
VOTES = wording(
    ConfigError,
    answers_malformed="no row of two answers ({reason})",
    llm_address="--llm_judge: got {url!r}, want the address of an endpoint",
    llm_key_in_the_clear="--llm_judge {url}: the key would cross the network unencrypted",
    llm_silent="--llm_judge {url}: nobody answers ({reason})",
    llm_refuses="--llm_judge {url}: status {status}: {reason}",
    llm_other_dialect="--llm_judge {url}: it answers, and not as /chat/completions",
    llm_refuses_every_pair="It refuses every pair so far",
    llm_has_no_pair="has no row with two different answers",
    llm_key_unreadable="--llm_key_file {path}: cannot be read",
    llm_key_words="--llm_key_file {path}: got {count} words, want one",
    llm_without_model="--llm_judge {url}: no --llm_model",
    llm_flags_alone="judge: got {flags} without --llm_judge",
) | wording(pair_gone="is none of this run now: it was judged anew")
SERVICE = (
    wording(
        ConfigError,
        open_address="Give --token_file",
        token_file_mode="mode {mode}, want 0o600: ...chmod 600",
        method_not_taken="method: {model} does not take {name!r}",
        webhook_secret_mode="webhooks: secret_file {file}: mode {mode}, want 0o600",
        webhook_twice="webhooks: ...want each url once: an address stands twice",
        webhook_secret_none="webhooks: secret_file {file}: it holds no secret, want whsec_",
        webhook_secret_unreadable="webhooks: secret_file {file}: {reason}. Make one",
        dpo_alone="{model} learns from preferences alone, want type 'dpo'",
        dpo_loss='preference.loss={loss!r}: want "dpo"',
        batch_of_devices="Use a multiple of {devices}, such as {fix}.",
        steps_too_many="at most {most} are allowed",
        no_service_address="--url: got {url!r}, want the address that `lathe serve` prints",
        token_in_the_clear="--url {url}: the token would cross the network unencrypted",
        two_shares_in_offer="data.valid_share={share} and held_out={held_out}: want one share",
    )
    | wording(
        Unreachable,
        no_service="{url}: no service answers (",
        answer_not_json="{url}: it answers, and not in JSON",
    )
    | wording(
        DataError,
        none_held_out="training_file: no row can be held out for validation, ...a validation_file.",
    )
    | wording(
        # texts of answers
        event_unknown="after: there is no {event!r}",
        job_of_another_request="of another request",
        job_not_paused="is not paused",
        job_over="has {state}: it can no longer be",
        model_unknown="model: got {model!r}, want one of {models}, or a model that you have tuned.",
        upload_unknown="{key}: there is no file {file!r} of yours. Upload it first",
        request_value="{key}...: got {value!r}. {reason}",
        method_not_served="{name!r} is not served: want 'supervised' or 'dpo'",
        method_block_twice="a block {block!r} with type={name!r}",
        row_keys_unknown="line {line}: got the keys {keys}, want",
        not_judged="This run has no judge.json. Make one on the server's machine: lathe judge {run}",
        gate_refused_job="The gate kept its model back: {reasons}.",
        batch_unknown="No such batch: {name!r}",
        line_streamed="body.stream: got {value!r}, want false",
        not_json="{file}: no JSON, or one that is nested too deeply",
        two_values="hyperparameters.{name} is {beside} beside `method` and {inside} in it",
        batch_of_another_folder="it is the batch {name!r}. Remove the folder",
        batch_purpose="input_file_id: {file} has the purpose {purpose!r}, want 'batch'",
        batches_unserved="batches: this service answers none (batch_models=0)",
        answers_equal="line {line}: got two equal answers, {answer}",
        upload_purpose="{key}: {file} has the purpose {purpose!r}, want 'fine-tune'",
        checkpoint_unknown="The checkpoint {name!r} does not exist, or is not yours",
        checkpoint_stays="{name} is a checkpoint, from which its job may go on",
        model_in_use="{model}: {jobs!r} begin with it and have not ended",
        permissions_unserved="Permissions of a checkpoint: got a request to share it",
        offer_answers_nothing="{name!r} is tuned by jobs, and answers nothing itself",
        request_key_unknown="{key}: there is no such parameter",
        limits_twice="max_tokens: got {got} beside max_completion_tokens, which is {other}",
        parameters_of_no_object="got the type {type!r} of the parameters of {name}, want 'object'",
        contexts_wanted="wants contexts",
        contexts_unread="reads no contexts",
        makes_none="makes no {things}",
        dimensions_fixed="dimensions: got {got}, want {width}:",
        service_token_wanted="want a token",
        share_used="{holder} has {count} {things}; at most {most} are allowed ({key}). Wait",
        server_busy="The server has {total} requests and streams in progress; at most {most}",
        jobs_above_quota="{live} jobs of {owner} have not ended, at most {most} may",
        bytes_above_quota="{owner} keeps {kept} bytes of files, and {more} more are above the quota of {most}. Delete",
        number_too_large="{number} is larger than any number of 64 bits",
        disk_refuses="The disk is full or refuses writes",
        ask_later="Ask again",
        file_gone="{path}: it was deleted a moment ago",
        file_refuses="It cannot be read or written: {reason}.",
        tokens_unreadable="The server cannot read its tokens now",
        not_understood="{path}: the server does not understand it. The server's log says why",
        row_too_wide="a row of more than {most} values",
        worker_ended="has ended, or is stuck",
    )
)

# Sweeps, searches, and runs that stop on the way
SEARCHING = wording(
    ConfigError,
    sweep_kind="sweep: got {kind}, want a dictionary",
    sweep_key="sweep: got the key {key!r}, want a dotted one",
    sweep_no_block="{path} is {value} in the dictionary, want a block of keys",
    sweep_not_alone="Want the sweep alone in its group",
    swept_empty="sweep[{key!r}]: got an empty list, want at least one value",
    axis_kind="sweep[{key!r}]: got {kind}, want a list of values",
    axis_twice="sweep[{key!r}]: got {value} twice, want each value once",
    axis_form="want exactly one of choice, ",
    axis_bounds="want two numbers, the lower one first",
    axis_not_positive="log_uniform got {bounds}, want numbers above 0",
    axis_not_whole="integer got {bounds}, want whole numbers",
    grid_of_range="sweep[{key!r}]: got a range, and a grid wants values",
    trials_of_grid="search.trials: got {count} for a grid",
    trials_missing="search.trials: got none, and",
    trials_too_many="the sweep gave only {count} that differ",
    rungs_order="search.rungs: got {rungs}, want steps in rising order",
    rung_late="search.rungs: got {rung}, a rung beyond the run, whose last step is {steps}",
    rungs_of_lengths="trials of several lengths cannot be compared",
    rungs_of_epochs="they are steps, and this dictionary states epochs",
    optuna_chooses="Optuna chooses its experiments one after the other",
    until_late="--until {until}: got a step beyond the run, whose last one is {steps}",
    until_of_search="the rungs of a search say where its trials stop",
) | wording(ResumeError, search_changed="is of another sweep or search than the group states now")

# Preferences, and what a run's start says of answers
PREFERENCES = wording(
    DataError,
    preference_side_absent="'{side}' is missing (keys: ...A row has a prompt, chosen and rejected",
    preference_prompt_absent="'prompt' is missing, and 'chosen' and 'rejected' begin with no turn",
    preference_label="'label' is {label}, want true or false",
    preference_single="a completion without 'chosen' and 'rejected', and preference.loss='{loss}' learns",
    preference_beginning="of 'chosen' and 'rejected' one is the beginning of the other, ...Give the 'prompt'",
    preference_margin="no 'margin', and no 'score_chosen' with 'score_rejected'",
    preference_not_text="the {part} is {value}, want text. Lists of turns are conversations",
    preference_answer="an answer is {value}, want text, or a list of turns",
    preference_input="'input' is {value}, want an object with a list of messages",
    answer_scored_absent="want 'prompt' and 'completion', the answer that is scored",
    start_row_unread="was not read by the model that the run began with",
    start_part_torn="{part}: ...the next start of the run makes it again",
) | wording(
    ConfigError,
    preference_key="{key} with loss='{loss}', which does not read it",
    preference_stream="data.stream=true with preference.loss='{loss}'",
    preference_chat_of_two='data.source="chat" with a {family}, whose encoder reads the prompt',
    preference_reward_of_two="preference.loss='reward' with a {family}, of which nothing here takes",
    draws_no_answers="draws no answers of an encoder-decoder. Leave out",
    preference_pictures="base: a {family} reads pictures, too; want a model of texts alone",
)

PREFERENCES |= wording(LatheError, start_unread="has not read these rows: call read_start() first")

# Distillation
TEACHERS = (
    wording(
        ConfigError,
        teacher_stream="data.stream=true with teacher, which reads every row before the first step",
        teacher_terms="{terms} with teacher.weight=1.0, which leaves no cross-entropy",
        teacher_tokenizer="teacher: its tokenizer ({source}) gives {count} of {tokens} tokens another id than the student's: got {got} for '{token}', want {want}. Its",
        teacher_of_another_kind="teacher: base: got model_type {family!r}",
        teacher_too_small="teacher: ...has ids up to {largest}, the base only {embeddings} embeddings",
        teacher_positions="teacher: data.max_tokens={max_tokens} is longer than the model's {positions} positions",
    )
    | wording(DataError, teacher_row_unread="was not read by the teacher: the rows have changed")
    | wording(DivergedError, teacher_not_finite="the teacher gives a token a log-probability that")
    | wording(
        StorageError,
        teacher_disk="{size} of what the teacher says are still to be written, {free} are free",
    )
)

# Two models on the same rows
JUDGING = wording(
    ConfigError,
    gate_kept_base="experiment {run}, which it names, has no final/: its gate kept it back",
    gate_score_unknown="judge.gate={name!r}: no such score by row",
    gate_score_untested="judge.gate: {name!r} has no result by row",
    gate_rows_few="judge.gate={name!r}: {count} rows have this score, and a gain needs",
    gate_no_json="is not JSON ({reason}). Write it such as",
    gate_without_bound="nothing must hold: give gain, at_least or at_most",
    gate_of_slices="is a number of slices: want",
    gate_of_no_text="with keep=None: no text is read",
    judged_run_absent="{command} {run}: is no run in",
    judge_of_two_kinds="Give the one or the other",
    judged_seed_twice="judge: got run {run} twice, want different runs",
    judged_against_itself="judge: run {run} would be compared with itself",
) | wording(
    DataError,
    judged_rows_trained="judge: {count} of {rows} rows of the {split} split are training rows",
)

# The operations of a driven run
OPERATIONS = (
    wording(OperationConflict, operation_conflict="operation {seq} was sent before with another")
    | wording(
        OperationGap,
        operation_gap="operation {seq} does not follow the last one, {last}. Send",
        result_gap="the result of operation {seq} does not follow",
    )
    | wording(
        ReplayDiffers,
        replay_differs="operation {seq} was run again ...: {then}} then, ...: {now}} now",
    )
    | wording(DivergedError, sample_not_finite="no token can be drawn: the model computes NaN")
    | wording(ResumeError, records_held="another process writes")
    | wording(
        CheckpointError,
        records_altered="no whole record, although more was written behind it",
        log_compacted="The log was compacted beyond the state",
    )
    | wording(
        DataError,
        driven_inputs_differ="row {index} has the loss inputs",
        driven_axis_differs="row {index}: {name} has the shape",
        payload_unreadable="the payload of rows is no safetensors file",
        payload_no_number="the payload of rows: got no number of {name!r} for a token",
        driven_inputs_foreign="; {name} wants target_tokens",
        driven_row_long="got {count} tokens, want 1 to {limit} (data.max_tokens)",
        driven_id_foreign="got the id {id} at position",
        driven_not_finite=", {key}: got nan at position",
        driven_shape=", {key}: got the shape",
        driven_no_rows="got no rows. Send at least one",
        driven_state_absent="load_state: there is no folder",
    )
    | wording(
        ConfigError,
        driven_no_gradient="optim_step: there is no gradient. Send",
        driven_loss_unknown="loss_fn={name!r} is not computed here",
        driven_loss_config="loss_fn_config: {key!r} is no number of {name}",
        driven_loss_number="loss_fn_config: {key}=",
        driven_adam="optim_step: {name}: got",
        driven_name="name={name!r}: want letters, digits",
        driven_name_there="save_state: {name!r} is there already",
        driven_create_differs="create: lora rank={rank}, but the dictionary",
        driven_kind="{kind!r} is no kind of operation",
        driven_not_created="the run was not created yet. Send create first",
        driven_has_ended="the run has ended. Create another one",
        driven_key='data.source="client" with {key}: the client sends',
        driven_without_lora="trains adapters beside a frozen base",
        driven_reads_files="reads no rows from files: leave",
        put_aside_of_files="put_aside_s with source",
    )
)

# Runs that share the worker of another one
SHARING = wording(
    ConfigError,
    shared_changes_base="data.together={count} with lora.{key}: runs that share a base leave it",
    shared_of_files="together with source={source!r}, whose run computes alone",
    shared_zero3="data.together with ZeRO-3: one base serves many runs only where it is whole",
    shared_unsharable="data.together: this base has {what}. Experts read",
    shared_differing="{guest} cannot be computed on the base of {host}: they differ in {keys}. Send",
    shared_without_host="-j beside: got a job without a host",
    together_refused="--together: these experiments cannot be trained on one base....Change these, or",
    together_of_sharing="got sequence_parallel_size={count}, want ranks with rows of their own",
    together_unsharable="--together: this base has {what}. Experts read",
    together_foreign="--together with {flags}: one process here trains a whole group",
    together_replay="trained with others on one base (--together), so that its last bits",
) | wording(
    ReplayDiffers,
    shared_other_world="operation {seq} was computed on {was} rank(s), and now there are {now}",
)

# Texts of answers of the Tinker dialect, and of futures that failed
STEPS = wording(
    operation_conflict_http="{run}: operation {seq} was sent before with another content",
    operation_gap_http="Operation {seq} of {run} does not follow the last one, ...operation {next}",
    steps_target_shape="target_tokens: got the shape {shape}, want [{length}] or",
    steps_no_target="target_tokens: got no target for a token",
    steps_not_finite="{input}: got NaN or an infinite number",
    steps_input_missing="the loss {loss} wants loss_fn_inputs[{name!r}]",
    steps_input_unknown="the loss {loss} reads no {name!r}, want",
    steps_row_length="row {row}: got {length} tokens, want 1 to {most}.",
    steps_graph_refused="no graph of a request is run here",
    steps_loss_unknown="loss_fn: got {name!r}.",
    steps_saved_before="{kind}/{name} was saved before",
    steps_sampler_of_others="got {number}, which names the sampler of other weights",
    steps_token_quota="{owner} has sent {used} of {most} tokens, and these are {more} more",
    steps_name="path: got {name!r}, want a name of letters",
    steps_bytes_quota="{owner} keeps {size} bytes of runs, and {more} more are above the quota of {most}",
    steps_sessions="{owner} has {most} sessions, as many as a token may have",
    steps_seq_negative="seq_id: got {seq}, want 0 or more",
    steps_sparse_large="numbers when they are laid out, want at most {most}",
    steps_parts="The rows have more than {most} parts.",
    driven_not_active="The run {state}: it holds no device.",
    driven_goes_on="The run is {status}. Cancel it first",
    driven_model="was made by a driven run. Delete that: DELETE /lathe/v1/runs/{run}.",
    driven_deleted="{run} was deleted. Use the next model_seq_id.",
    sample_memory="num_samples={count} of {most} tokens behind a prompt of {length} do not fit into the memory",
    steps_weights_deleted="The weights of {sampler} were deleted. Begin another sampler.",
    steps_saved_again="{kind}/{name} is being saved again. Delete it when that is done.",
    steps_sampler_made="{sampler} was made ...Use the next sampling_session_seq_id",
    steps_copy_number="model_seq_id: got {number}, want less than {most}",
    steps_two_params="optim_params: adam_params is there, too. Send one of the two.",
    steps_token_unknown="weights_access_token: this server knows no such token",
    steps_log_full="The operations of {run} since its last two states have {most} bytes",
)


ROOMS: dict[str, dict[str, Wording]] = {
    "steps": STEPS,
    "operations": OPERATIONS,
    "teachers": TEACHERS,
    "judging": JUDGING,
    "preferences": PREFERENCES,
    "files": FILES,
    "harnesses": HARNESSES,
    "streams": STREAMS,
    "odd text": ODD_TEXT,
    "shards": SHARDS,
    "data files": DATA_FILES,
    "rows": ROWS,
    "conversations": CONVERSATIONS,
    "passages": PASSAGES,
    "vectors": VECTORS,
    "sets": SETS,
    "dictionary": DICTIONARY,
    "columns": COLUMNS,
    "api": API,
    "groups": GROUPS,
    "searching": SEARCHING,
    "deepspeed": DEEPSPEED,
    "bases": BASES,
    "adapters": ADAPTERS,
    "cross attention": CROSS_ATTENTION,
    "fid": FID,
    "retriever": RETRIEVER,
    "batches": BATCHES,
    "summariser": SUMMARISER,
    "vera": VERA,
    "training": TRAINING,
    "checkpoints": CHECKPOINTS,
    "peers": PEERS,
    "plan": PLAN,
    "jobs": JOBS,
    "submission": SUBMISSION,
    "snapshots": SNAPSHOTS,
    "votes": VOTES,
    "service": SERVICE,
    "sharing": SHARING,
}

WORDINGS = {code: wording for room in ROOMS.values() for code, wording in room.items()}
# Sentences that end the messages of many faults.
ENDS = {"nearest": "Did you mean {nearest!r}?", "legal": "Legal: {legal}."}
_PARTS = re.compile(r"(\.\.\.(?!\.)|\{\w+(?:!r)?\})")


@contextmanager
def refused(
    code: str | Fault, error: type[Exception] | None = None, /, **fields: Any
) -> Iterator[pytest.ExceptionInfo[Exception]]:
    """Fail unless the block raises the error of this code, which names these fields.

    error: the type that is wanted here, where the code has several or a narrower one is meant.
    """
    name, fields = _stated(code, fields)
    errors = (error,) if error else WORDINGS[name].errors
    assert errors, f"{name} is no error but a text: use says"
    with pytest.raises(errors) as caught:
        yield caught
    assert any(issubclass(caught.type, wanted) for wanted in WORDINGS[name].errors)
    if isinstance(caught.value, LatheError):
        codes = (EXIT_CODES[kind] for kind in caught.type.__mro__ if kind in EXIT_CODES)
        assert caught.value.exit_code == next(codes)
    says(name, caught.value, **fields)


def says(code: str | Fault, text: str | BaseException, /, **fields: Any) -> dict[str, str]:
    """The fields that the text tells, those that the test does not state among them.

    Fails unless the text (or the message of this error) says what the code's pattern says, with
    the values of these fields.
    """
    name, fields = _stated(code, fields)
    text = str(text)
    found = re.search(_expression(name, fields), text)
    assert found, f"{name}: {WORDINGS[name].pattern!r} with {fields} is not said by:\n{text}"
    for end in fields.keys() & ENDS.keys():
        ending = re.compile(_compiled(ENDS[end], fields))
        assert ending.search(text, found.start()), f"{name}: no {end}={fields[end]!r} in:\n{text}"
    return found.groupdict()


def is_said(code: str | Fault, text: str, /, **fields: Any) -> bool:
    """Whether the text says it: for what a message must not say."""
    name, fields = _stated(code, fields)
    return re.search(_expression(name, fields), text) is not None


def _stated(code: str | Fault, fields: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    name, fields = (code.code, code.fields | fields) if isinstance(code, Fault) else (code, fields)
    known = {*re.findall(r"\{(\w+)", WORDINGS[name].pattern), "at", *ENDS}
    assert fields.keys() <= known, f"{name} has no field {sorted(fields.keys() - known)}"
    return name, fields


def _expression(code: str, fields: dict[str, Any]) -> str:
    start = _value(fields["at"]) + ":? " if "at" in fields else ""
    return "(?s)" + start + _compiled(WORDINGS[code].pattern, fields)


def _compiled(pattern: str, fields: dict[str, Any]) -> str:
    parts: list[str] = []
    for part in _PARTS.split(pattern):
        name = part.strip("{}").removesuffix("!r")
        if part == "...":
            parts.append(".*?")
        elif not _PARTS.fullmatch(part):
            parts.append(re.escape(part))
        elif name not in fields:
            parts.append(f"(?P<{name}>.*?)")
        else:
            value = fields[name]
            is_quoted = part.endswith("!r}") and not isinstance(value, re.Pattern)
            parts.append(_value(repr(value) if is_quoted else value))
    return "".join(parts)


def _value(value: Any) -> str:
    if isinstance(value, re.Pattern):
        return value.pattern
    text = re.escape(str(value))
    # 1 is not said by 10 or 0.1
    return rf"(?<![\d.]){text}(?!\d|\.\d)" if isinstance(value, int | float) else text
