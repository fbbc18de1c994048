"""Faults in the reading of a user's own rows, in conversations and in encoding."""

from tests.mutants.fault import Fault

OWN = "tests/unit/test_own_rows.py"
CHAT = "tests/unit/test_chat.py"
LISTS = "tests/unit/test_lists.py"
FOREIGN = "tests/unit/test_foreign_text.py"
VANISHES = "tests/unit/test_what_vanishes.py"
ENCODING = "tests/unit/test_encoding.py"
SHARDS = "tests/unit/test_shard_folder.py"
VECTORS = "tests/unit/test_embeddings.py"
OPENING = "tests/unit/test_opening.py -k line"

FAULTS = [
    Fault(
        "trainer/data/readers/columns.py",
        "for name, value in raw.items() if name not in replaced}",
        "for name, value in raw.items()}",
        why="a column of the file that is called like another of our names goes before the mapped",
        tests=OWN,
    ),
    Fault(
        "trainer/data/readers/columns.py",
        "row[name] = as_list(row[name], place, name)",
        "row[name] = row[name]",
        why="a list that stands in a text is learnt as that text",
        tests=LISTS,
    ),
    Fault(
        "trainer/data/formats/lists.py",
        "if has_commas not in (None, has_comma):",
        "if has_commas is has_comma is not has_comma:",
        why="a list with some of its commas is read as if nothing were wrong with it",
        tests=LISTS,
    ),
    Fault(
        "trainer/tasks/summariser/data.py",
        "values = as_list(value, place, column)",
        "values = value",
        why="a summary is learnt with the brackets of the list that it stood in",
        tests=LISTS,
    ),
    Fault(
        "trainer/data/readers/fields.py",
        "return str(value).strip()",
        "return str(value)",
        why="a passage with a blank behind its id is another one than that of the qrels",
        tests="tests/unit/test_passages_and_queries.py",
    ),
    Fault(
        "trainer/data/readers/row_files.py",
        "if problems:",
        "if problems and not entries:",
        why="of five files of a split one is read, and nobody is told",
        tests=VANISHES,
    ),
    Fault(
        "trainer/data/readers/quotes.py",
        "return len(contents) != num_columns",
        "return True",
        why="a cell that begins with a quote swallows the rows up to the next one",
        tests=VANISHES,
    ),
    Fault(
        "trainer/data/readers/own_rows.py",
        "question = normal_value(_asked(next(given, None)))",
        "question = normal_value(next(given, None))",
        why="a conversation is validated on a question that was trained on, with another answer",
        tests=VANISHES,
    ),
    Fault(
        "trainer/data/formats/normal_form.py",
        'return " ".join(folded.split())',
        "return text",
        why="a question is validated on that was trained on in another case",
        tests=VANISHES,
    ),
    Fault(
        "trainer/data/formats/json_text.py",
        "if len(values) < len(pairs):",
        "if len(values) > len(pairs):",
        why="of a key that stands twice in a row, one value is lost",
        tests=FOREIGN,
    ),
    Fault(
        "trainer/data/formats/json_stream.py",
        "if self.num_open > _MAX_OPEN:",
        "if self.num_open > 100 * _MAX_OPEN:",
        why="a file of brackets kills the process",
        tests=FOREIGN,
    ),
    Fault(
        "trainer/data/formats/packed.py",
        "if self._unpacked_bytes > max(FREE_BYTES, MAX_RATIO * packed_bytes):",
        "if self._unpacked_bytes < 0:",
        why="a small file fills the memory",
        tests=FOREIGN,
    ),
    Fault(
        "trainer/data/readers/own_rows.py",
        'if is_valid == (split == "valid"):',
        'if is_valid or split == "train":',
        why="validation rows are training rows",
        tests=OWN,
    ),
    Fault(
        "trainer/tasks/causal_lm/chat.py",
        "return len(opening), len(ended if has_end else closed)",
        "return len(opening), len(closed)",
        why="what the template writes behind the end of a turn is learnt",
        tests=CHAT,
    ),
    Fault(
        "trainer/tasks/causal_lm/chat.py",
        'message.get("weight", 1) == 1',
        'message.get("weight", 1) in (0, 1)',
        why="turns of weight 0 are learnt",
        tests=CHAT,
    ),
    Fault(
        "trainer/tasks/causal_lm/task.py",
        "return ids if is_there else [*self.opening, *ids]",
        "return ids",
        why="texts lack the token with which their base was trained to begin",
        tests="tests/unit/test_causal_lm_task.py",
    ),
    Fault(
        "trainer/tasks/causal_lm/chat.py",
        "or self._writes(self.tokenizer.bos_token):",
        "or self.tokenizer.bos_token is None:",
        why="a conversation begins with two tokens that begin a text",
        tests=CHAT,
    ),
    Fault(
        "trainer/data/encoding.py",
        "            if len(waiting) >= _AHEAD * num_proc:",
        "            if len(waiting) > _AHEAD * num_proc and waiting.rotate() is None:",
        why="rows of several processes come in another order",
        tests=ENCODING,
    ),
    Fault(
        "trainer/data/token_store.py",
        "lost = max(0, text_length - cut.limit)",
        "lost = max(0, text_length - cut.limit - 1)",
        why="a run begins with too few tokens that were cut",
        tests=OPENING,
    ),
    Fault(
        "trainer/data/shard_folder.py",
        'if not path.match(f".{PLAN}.*.tmp")]',
        "]",
        why="encode refuses its own folder after a kill while it wrote the plan",
        tests=SHARDS,
    ),
    Fault(
        "trainer/data/shard_folder.py",
        'if not path.match(f".{PLAN}.*.tmp")]',
        'if not path.match(".*") and not path.match(f"{PLAN}*")]',
        why="encode writes into a folder that holds somebody's hidden files",
        tests=SHARDS,
    ),
    Fault(
        "trainer/data/shard_folder.py",
        'self.path.glob(".*.tmp")',
        'self.path.glob(f".{META}.*.tmp")',
        why="temporary files of killed processes stay in the folder for ever",
        tests=SHARDS,
    ),
    Fault(
        "trainer/data/shard_folder.py",
        'return record if path.stat().st_size == record["size"] else None',
        "return record",
        why="a shard that was cut short, or lost, is taken for whole",
        tests=SHARDS,
    ),
    Fault(
        "trainer/data/shard_folder.py",
        "distributed.broadcast(self.missing(count))[distributed.rank() :: distributed.world()]",
        "distributed.broadcast(self.missing(count))",
        why="every rank computes every shard",
        tests=SHARDS,
    ),
    Fault(
        "trainer/data/shard_folder.py",
        'if name not in (choice, "format") and begun.get(name) != value',
        'if name not in (choice, "format") and begun.get(name, value) != value',
        why="a folder of an older version, whose plan lacks a key, is gone on with",
        tests=SHARDS,
    ),
    Fault(
        "trainer/data/shard_folder.py",
        'if values.pop("format", FORMAT) != FORMAT:',
        'if values.pop("format", FORMAT) < FORMAT:',
        why="a folder of a later version is read as one of this version",
        tests=SHARDS,
    ),
    Fault(
        "trainer/retrieval/embeddings.py",
        'exact.astype(plan.dtype, order="C")',
        "exact.astype(plan.dtype)",
        why="the numbers of vectors that come column by column are mixed up",
        tests=VECTORS,
    ),
    Fault(
        "trainer/retrieval/embeddings.py",
        "if place + 1 == len(plan.rows(shard)):",
        "if place + 1 == plan.shard_rows:",
        why="the last shard of a corpus is never written",
        tests=VECTORS,
    ),
]
