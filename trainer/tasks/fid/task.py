"""Questions answered by a T5 that reads many retrieved passages.

It is the reader of NaturalQuestions and TriviaQA.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

from torch import nn

from trainer.config.identity import canonical_json
from trainer.config.optimizer.lora import Lora
from trainer.config.schema import Base
from trainer.data import vocabulary
from trainer.data.content import content_of_rows
from trainer.data.padding import flat, unflat
from trainer.data.readers import retrieved
from trainer.data.readers.passages import corpus_passages, numbers_by_id
from trainer.data.token_store import TokenStore, open_store
from trainer.errors import ConfigError, DataError
from trainer.metrics.mergeable import answer_scores
from trainer.models import adapters, base_model, base_source
from trainer.models.families import T5, check_family
from trainer.models.frozen.quantized import Bits
from trainer.models.losses import Terms
from trainer.models.packed.layout import pack_targets
from trainer.models.weights import weight_files
from trainer.protocol.abilities import GREEDY, Answered, Search, Uncut, by_row, scored_answers
from trainer.protocol.task import Batch, Cut, Encoded, Places, Row
from trainer.runtime import distributed
from trainer.runtime.batch import to_device
from trainer.tasks.distilled import DistilledTask
from trainer.tasks.fid import fido
from trainer.tasks.fid.config import Config
from trainer.tasks.fid.fused_layout import pack
from trainer.tasks.fid.model import FiD, Generation
from trainer.tasks.fid.tokens import Prompts, drawn_target
from trainer.tasks.fid.weights import add_cross_bias
from trainer.tasks.generated import refuse_sampling

_MADE_UP = "is_made_up"  # marks the raw row of specimen()


class Task(DistilledTask[Config]):
    """A question with its passages in the encoder, its answer in the decoder."""

    kind: ClassVar[base_model.Kind] = "seq2seq_lm"
    base_name: ClassVar[str] = "t5"
    rows_are_of_files: ClassVar[bool] = True

    def __init__(self, cfg: Config, places: Places) -> None:
        super().__init__(cfg, places)
        self.prompts = Prompts(self.tokenizer, cfg.data)

    @cached_property
    def is_packed(self) -> bool:
        return True

    # Model
    # ----------------------------------------------------------------------------------------------

    def loaded(
        self,
        base: Base,
        lora: Lora | None,
        *,
        bits: Bits | None = None,
        init_from: str | None = None,
    ) -> nn.Module:
        model: Any = super().loaded(base, lora, bits=bits, init_from=init_from)
        if self.cfg.reader.compat_cross_bias:
            add_cross_bias(model.t5, base_source.resolve(base, self.places))
        return model

    def operate(self, base: Any) -> FiD:
        config = base.config
        check_family(
            config,
            (*T5, fido.MODEL_TYPE),
            advice="A reader's passages are encoded as one stream of real tokens, which only T5's "
            "own encoder does here; LongT5's local attention and T5Gemma's encoder do not.",
        )
        fido.check_base(config, self.cfg.reader, has_adapters=self.cfg.lora is not None)
        if self.cfg.reader.compat_cross_bias and config.model_type != "t5":
            raise ConfigError(
                f"reader.compat_cross_bias: a {config.model_type} never had such a table in "
                "cross-attention. Leave it out."
            )
        if config.eos_token_id != self.prompts.end:
            raise ConfigError(
                f"base.config.eos_token_id={config.eos_token_id}, but the tokenizer ends texts "
                f"with {self.prompts.end}: answers would never end. Make them equal, or use the "
                "base's own tokenizer."
            )
        if config.decoder_start_token_id is None:
            raise ConfigError(
                "base.config.decoder_start_token_id: missing. A T5 starts answers with its pad, "
                "id 0."
            )
        return FiD(
            base,
            self.cfg.reader,
            recompute_every=self.cfg.train.recompute_every,
            terms=Terms.of(self.cfg.train),
            distillation=self.distillation,
        )

    def read_as_trained(self) -> None:
        """A teacher's cross-attention is what its own config.json says, not what the student's
        reader does.
        """
        config = base_source.config_of(self.cfg.base, self.places)
        reader = fido.reader_of(config, self.cfg.reader)
        self.cfg = self.cfg.model_copy(update={"reader": reader})

    def load_export(self, folder: Path) -> nn.Module:
        base = base_source.resolve(self.cfg.base, self.places)
        is_base = isinstance(base, str) and (
            weight_files.find_file(base, "config.json") == folder / "config.json"
        )
        if not is_base and not adapters.are_in(folder):
            config = base_source.config_of(str(folder), self.places)
            fido.check_trained(config, self.cfg.reader, folder=folder)
        return super().load_export(folder)

    def exported_config(self) -> Any:
        config = fido.reader_config(super().exported_config(), self.cfg.reader)
        if config.model_type == fido.MODEL_TYPE:
            config.architectures = [fido.FiDOT5.__name__]
        return config

    def generation(self) -> dict[str, Any]:
        ends = {"eos_token_id": self.exported_ends, "pad_token_id": self.pad}
        return {"max_length": self.answer_tokens(), "num_beams": 1, "do_sample": False, **ends}

    # Data
    # ----------------------------------------------------------------------------------------------

    def rows(self, split: str) -> Iterable[Row]:
        data = self.cfg.data
        return retrieved.rows(
            self.places.data_path,
            split,
            source="nq" if data.reads == "nq" else data.source,
            own=data,
            ranking=getattr(data.rankings, split, None),
            contexts=data.contexts,
            sort_by_score=data.sort_by_score,
            cache_dir=self.places.cache_dir,
        )

    @cached_property
    def _corpus(self) -> TokenStore | None:
        """The passages of data.corpus, tokenised once; None when the rows hold their passages."""
        file = self.cfg.data.corpus
        if file is None:
            return None

        def passages() -> Iterable[Row]:
            return corpus_passages(self.places.data_path, file)

        passages_id = {
            "tokenizer": vocabulary.tokenizer_id(self.tokenizer),
            "passage_tokens": self.cfg.data.passage_tokens,
        }
        encoding_id = canonical_json({"task": "fid", "corpus": passages_id})
        cache, split = self.places.cache_dir, "corpus"
        settings = canonical_json({"data_path": str(self.places.data_path), "corpus": file})
        return open_store(
            passages,
            lambda row: Encoded({"ids": self.prompts.passages([row])[0]}),
            encoding_id=encoding_id,
            split=split,
            cache_dir=cache,
            length=lambda encoded: len(encoded["ids"]),
            num_proc=self.places.num_proc,
            content=content_of_rows(
                passages, encoding_id, split, settings=settings, cache_dir=cache
            ),
        )

    @cached_property
    def _corpus_rows(self) -> dict[str, int]:
        """The row number of each passage of the corpus, by the passage's id."""
        assert self.cfg.data.corpus is not None
        return numbers_by_id(self.places.data_path, self.cfg.data.corpus)

    def encode(self, row: Row) -> Encoded:
        """Token ids of the question, its passages and its targets; for passages of data.corpus
        their row numbers there.
        """
        question, limit = self.prompts.question(row["question"]), self.cfg.data.passage_tokens
        encoded = {"question": question, **flat(self.prompts.targets(row), "targets")}
        cuts: dict[str, Cut] = {}
        if _MADE_UP in row or self._corpus is None:
            whole = self.prompts.whole_passages([_with_text(one, row) for one in row["ctxs"]])
            passages = [ids[:limit] for ids in whole]
            encoded |= flat(passages, "passages")
            lengths = [len(passage) for passage in passages]
            read = [len(question) + len(ids) for ids in whole]
            cuts["passages"] = Cut("data.passage_tokens", limit, read)
        else:
            numbers: list[int] = []
            for passage in row["ctxs"]:
                number = self._corpus_rows.get(str(passage.get("id")))
                if number is None:
                    raise DataError(
                        f"question {row['id']} ({row['question']!r}): its passage "
                        f"{passage.get('id')!r} is no id in {self.cfg.data.corpus}. Give the "
                        "corpus that the passages were retrieved from."
                    )
                numbers.append(number)
            encoded["corpus_rows"] = numbers
            lengths = [int(self._corpus.lengths[number]) for number in numbers]
        longest = len(question) + max(lengths, default=0)
        lost_labels = self.prompts.lost_labels(row)
        return Encoded(encoded, is_truncated=longest > limit, lost_labels=lost_labels, cuts=cuts)

    def limits(self) -> dict[str, int]:
        data = self.cfg.data
        targets = {} if data.target_tokens is None else {"data.target_tokens": data.target_tokens}
        return {"data.passage_tokens": data.passage_tokens, **targets}

    def specimen(self) -> Row:
        """A row that holds its passages, even when the experiment looks passages up in a corpus."""
        data = self.cfg.data
        answer = self.filler() if data.target_tokens is not None else "word " * data.answer_tokens
        passages = [{"title": "", "text": self.filler()}] * data.contexts
        return {
            "id": "0",
            "question": self.filler(),
            "answers": [answer],
            "ctxs": passages,
            _MADE_UP: True,
        }

    def uncut_fields(self, row: Row) -> dict[str, Uncut]:
        """targets; and passages, each behind its question, when the rows hold them."""
        data = self.cfg.data
        whole = Prompts(
            self.tokenizer, data.model_copy(update={"passage_tokens": None, "target_tokens": None})
        )
        targets = Uncut(whole.targets(row), data.target_tokens, "data.target_tokens", labels_from=0)
        if self._corpus is not None:  # its passages are cut once, when the corpus is encoded
            return {"targets": targets}
        question = whole.question(row["question"])
        passages = [
            [*question, *ids]
            for ids in whole.passages([_with_text(passage, row) for passage in row["ctxs"]])
        ]
        return {
            "passages": Uncut(
                passages, data.passage_tokens, "data.passage_tokens", holds_answers=True
            ),
            "targets": targets,
        }

    def encoding_id(self) -> str:
        data, corpus = self.cfg.data, self._corpus
        return self.encoded_under(
            passage_tokens=data.passage_tokens,
            target_tokens=data.target_tokens,
            corpus=corpus.digest if corpus is not None else None,
        )

    def length(self, encoded: Mapping[str, Any]) -> int:
        return sum(len(prompt) for prompt in self._prompts_of(encoded))

    def _prompts_of(self, encoded: Mapping[str, Any]) -> list[list[int]]:
        """One prompt for each passage: the question and the passage, cut to data.passage_tokens.

        A question without passages has one prompt, the question alone.
        """
        if "corpus_rows" in encoded:
            assert self._corpus is not None
            passages = [self._corpus[int(number)]["ids"] for number in encoded["corpus_rows"]]
        else:
            passages = unflat(encoded, "passages")
        question = list(encoded["question"])
        return [
            [*question, *passage][: self.cfg.data.passage_tokens] for passage in passages or [[]]
        ]

    def collate(self, rows: Sequence[Mapping[str, Any]]) -> Batch:
        """A packed batch of the rows' passages (fused_layout.pack) and targets
        (layout.pack_targets).
        """
        data, reader = self.cfg.data, self.cfg.reader
        prompts = [self._prompts_of(row) for row in rows]
        batch = pack(
            prompts,
            bucketed=reader.attention == "bucketed",
            cross_width=data.passage_tokens if reader.compat_cross_bias else None,
        )
        targets = [self.target_of(row) for row in rows]
        # a row is what its passages are together, as the decoder reads them
        noise = self.noise(rows, [sum(map(len, passages)) for passages in prompts])
        return self.with_lesson(batch | pack_targets(targets) | noise, rows)

    @property
    def draws_targets(self) -> bool:
        return self.cfg.data.sample_targets

    def target_of(self, row: Mapping[str, Any]) -> Sequence[int]:
        return drawn_target(row, is_random=self.draws_targets)

    # Answers
    # ----------------------------------------------------------------------------------------------

    def answer_tokens(self) -> int:
        return self.cfg.data.answer_tokens

    def answers(
        self,
        model: nn.Module,
        rows: Sequence[Mapping[str, Any]],
        raw: Sequence[Row],
        *,
        search: Search = GREEDY,
        max_tokens: int | None = None,
    ) -> Answered:
        """Answers of at most data.answer_tokens tokens, the start token among them as published,
        and em, f1, precision, recall and recall_em of each row's best answer.
        """
        refuse_sampling(search, task="fid", texts="answers")
        how = Generation(
            self.answer_tokens() if max_tokens is None else max_tokens + 1,
            ends=self.ends,
            num_beams=search.num_beams,
            num_answers=search.num_answers,
            is_synced=distributed.must_keep_step(model),
        )
        tokens = model(generation=how, **self._on_device(rows))["tokens"][:, 1:].tolist()
        texts = [self.prompts.answer(ids, ends=self.ends) for ids in tokens]
        return scored_answers(by_row(texts, search), raw, search, answer_scores)

    def passage_scores(
        self, model: nn.Module, rows: Sequence[Mapping[str, Any]]
    ) -> list[list[float]]:
        """How much the first decoder step attends to each passage of each row (FiD-KD).

        A question without passages has an empty list.
        """
        passage_field = "passages_lengths" if self.cfg.data.corpus is None else "corpus_rows"
        batch = self._on_device(rows)
        scores = model(score_passages=True, **batch)["passage_scores"].tolist()
        question = batch["question"].tolist()
        of_row: list[list[float]] = [[] for _ in rows]
        for score, number in zip(scores, question, strict=True):
            if len(rows[number][passage_field]):
                of_row[number].append(score)
        return of_row

    def _on_device(self, rows: Sequence[Mapping[str, Any]]) -> Batch:
        return to_device(self.collate(rows))


def _with_text(passage: Row, row: Row) -> Row:
    if "text" not in passage:
        raise DataError(
            f"question {row['id']} ({row['question']!r}): its passage {passage.get('id')!r} has no "
            "text. Write the text there, or name the file that holds it in data.corpus."
        )
    return passage
