"""Faults in what leaves the house: exports, their cards, predictions."""

from tests.mutants.fault import Fault

EXPORTS = "tests/runs/test_exports.py"
PREDICT = "tests/runs/test_predict.py"
CHAT = "tests/unit/test_chat.py"
PROMPTS = "tests/unit/test_card_prompts.py"
WRITTEN = "tests/unit/test_model_folder.py"
FILES = "tests/unit/test_base_files.py"
ABSENT = "tests/unit/test_absent_weights.py"

FAULTS = [
    Fault(
        "trainer/tasks/cross_attention/modeling_cross_attention.py",
        "        middle = x + self.crossattention(self.ln_1(x), keys_values, now)",
        "        middle = x",
        why="elsewhere the model does not read its context",
        tests=EXPORTS,
    ),
    Fault(
        "trainer/tasks/cross_attention/modeling_cross_attention.py",
        "            self.base.disable_adapters()",
        "            pass",
        why="elsewhere contexts are read with the adapters of the decoder",
        tests=EXPORTS,
    ),
    Fault(
        "trainer/tasks/vera/exported/plausibility.py",
        ".double() / self.temperature",
        ".double()",
        why="elsewhere scores are not calibrated",
        tests=EXPORTS,
    ),
    Fault(
        "trainer/tasks/causal_lm/chat.py",
        "        return scored[-1]",
        "        return end",
        why="generation runs on behind the end of the assistant's turn",
        tests=CHAT,
    ),
    Fault(
        "trainer/tasks/causal_lm/trained.py",
        "prompt = _STILL + prompt",
        "pass",
        why="the program of a card writes the day on which it runs",
        tests=CHAT,
    ),
    Fault(
        "trainer/tasks/causal_lm/trained.py",
        "if ids[:1] != {opening}:",
        "if ids:",
        why="the program of a card opens a text twice",
        tests=PROMPTS,
    ),
    Fault(
        "trainer/tasks/causal_lm/task.py",
        "return self._ids(self.chat.opened(opened(raw, place)))",
        "return self._begun(self._ids(self.chat.opened(opened(raw, place))))",
        why="predict opens a conversation that its template opened behind a blank once more",
        tests=PROMPTS,
    ),
    Fault(
        "trainer/tasks/causal_lm/chat.py",
        "self._writer.text(messages, None).lstrip().startswith(token)",
        "token in self._writer.text(messages, None)",
        why="a token that ends answers is taken for the one that opens a conversation",
        tests=PROMPTS,
    ),
    Fault(
        "trainer/tasks/causal_lm/chat.py",
        ".lstrip().startswith(token)",
        ".startswith(token)",
        why="a conversation that a template opens behind a blank is opened twice",
        tests=PROMPTS,
    ),
    Fault(
        "trainer/tasks/fid/trained.py",
        '(asked + tokens(f" title:',
        '(tokens(f"question: {{question}} title:',
        why="the program of a card reads a question and a passage as one text",
        tests=PROMPTS,
    ),
    Fault(
        "trainer/tasks/summariser/trained.py",
        "document.strip()",
        "document",
        why="the program of a card reads the blanks around a document",
        tests=PROMPTS,
    ),
    Fault(
        "trainer/tasks/retriever/tokens.py",
        "bool(end) and self.after[-1:] != end",
        "bool(end)",
        why="a text of a retriever has two ends where its tokenizer writes one",
        tests=PROMPTS,
    ),
    Fault(
        "trainer/tasks/retriever/trained.py",
        "torch.tensor(row{ended})",
        "torch.tensor(row)",
        why="the program of a card leaves out the end of a text",
        tests=PROMPTS,
    ),
    Fault(
        "trainer/tasks/retriever/trained.py",
        'less=" - 1" if appends_end else ""',
        'less=""',
        why="the program of a card gives a text one token too many",
        tests=PROMPTS,
    ),
    Fault(
        "trainer/models/weights/model_folder.py",
        'values.pop("truncation_side", None)',
        "pass",
        why="elsewhere a retriever reads the end of a long text, and here its beginning",
        tests=PROMPTS,
    ),
    Fault(
        "trainer/tasks/cross_attention/modeling_cross_attention.py",
        '[: how["decoder_tokens"]][-room:]  #',
        '[: how["decoder_tokens"]]  #',
        why="elsewhere a question reaches beyond the positions of its base",
        tests=PROMPTS,
    ),
    Fault(
        "trainer/models/weights/absent.py",
        "id(weight) not in training",
        "id(weight) in training",
        why="a frozen weight that the files lack is another one in every process",
        tests=ABSENT,
    ),
    Fault(
        "trainer/models/weights/absent.py",
        'compile(r"(^|\.)pooler\.")',
        'compile(r"(^|\.)poolers\.")',
        why="a base without a pooler, which no task reads, is refused",
        tests=ABSENT,
    ),
    Fault(
        "trainer/models/weights/weight_files.py",
        'if ".." in Path(name).parts or Path(name).is_absolute()]',
        "if Path(name).is_absolute()]",
        why="the index of a base reads files outside of its folder",
        tests=FILES,
    ),
    Fault(
        "trainer/models/weights/config_file.py",
        "and value > _MOST_LAYERS",
        "and value > 10 * value",
        why="a config of 10^9 layers fills the memory",
        tests=FILES + " -k part",
    ),
    Fault(
        "trainer/models/weights/unsound.py",
        "if bool(tensor.isnan().any()):",
        "if bool(tensor.isnan().all()):",
        why="rows and learning rate are blamed for a NaN of the base",
        tests=FILES,
    ),
    Fault(
        "trainer/models/base_source.py",
        'if "rope_parameters" in legal else',
        'if "rope_theta" in legal else',
        why="a config that transformers 4 wrote is refused",
        tests=FILES,
    ),
    Fault(
        "trainer/data/vocabulary.py",
        '"GPT2Tokenizer" if named in (None, *_GENERIC) else named',
        "named",
        why="vocab.json and merges.txt of a tokenizer of no named class do not load",
        tests=FILES,
    ),
    Fault(
        "trainer/models/weights/model_folder.py",
        "        values |= _earlier_rotations(",
        "        dict() | _earlier_rotations(",
        why="transformers 4 rotates by another theta, without a warning",
        tests=WRITTEN,
    ),
    Fault(
        "trainer/models/weights/model_folder.py",
        'values.get("tokenizer_class") == "TokenizersBackend"',
        'values.get("tokenizer_class") == "Backend"',
        why="the tokenizer of an export does not load in transformers 4",
        tests=WRITTEN,
    ),
    Fault(
        "trainer/exports/record.py",
        "entries[-1] if entries",
        "entries[0] if entries",
        why="a card tells the scores of another evaluation",
        tests=EXPORTS,
    ),
    Fault(
        "trainer/evaluation/predict.py",
        "if piece % world == rank and not path.is_file():",
        "if piece % world == rank:",
        why="a killed prediction begins anew",
        tests=PREDICT,
    ),
    Fault(
        "trainer/evaluation/predict.py",
        "    return [by_row[n] for n in range(len(rows))]",
        "    return list(said.values())",
        why="predictions stand in the order of their lengths",
        tests=PREDICT,
    ),
    Fault(
        "trainer/tasks/cross_attention/reader.py",
        "context = self._encode_question(question) if self._kept is None else self._kept",
        "context = self._encode_question(question)",
        why="a context is read again for every question",
        tests=PREDICT,
    ),
]
