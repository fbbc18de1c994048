"""The optional abilities of a task. Each ability is a protocol, and a task that has its methods has
the ability.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

from torch import Tensor, nn

from trainer.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

    from trainer.metrics.mergeable import Ratio
    from trainer.protocol.task import Batch, Cut, Encoded, Row, Task


@dataclass(frozen=True)
class Search:
    """How answers are generated."""

    num_beams: int = 1  # 1: greedy
    num_answers: int = 1  # answers per row: the best beams, or with a temperature draws
    # None: the most likely token is chosen. A number: tokens are drawn; low numbers prefer likely
    # tokens.
    temperature: float | None = None
    # tokens are drawn from the most likely ones, whose probabilities sum up to this share
    top_p: float = 1.0
    seed: int = 0  # for the draws


GREEDY = Search()


@runtime_checkable
class EncodesRows(Protocol):
    """The ability to encode many rows by one call of the tokenizer."""

    def encode_rows(self, rows: Sequence[Row]) -> list[Encoded]:
        """`Task.encode` of each row. An error is that of the first wrong row."""
        ...


@dataclass(frozen=True)
class GeneratedText:
    """A text that was generated."""

    text: str
    tokens: int  # how many were generated, without the one that ended it
    is_cut: bool  # no token ended it: it has the most tokens that were allowed


@dataclass(frozen=True)
class Answered:
    """The generated answers of some rows."""

    best: list[GeneratedText]  # by row
    scores: dict[str, Ratio]  # over these rows
    # by row: several answers, the best first; None if search.num_answers is 1
    n_best: list[list[str]] | None = None

    @property
    def predictions(self) -> list[str]:
        """The text of the best answer, by row."""
        return [one.text for one in self.best]


def scored_answers(
    n_best: list[list[GeneratedText]],
    raw: Sequence[Row],
    search: Search,
    score: Callable[[Sequence[str], Sequence[Sequence[str]]], dict[str, Ratio]],
) -> Answered:
    """The answers of the rows `raw` with their scores.

    n_best: search.num_answers texts for each row, the best first. score: computes the scores of
    predictions against their references, at least one each.
    """
    best = [of_row[0] for of_row in n_best]
    scored: list[str] = []
    references: list[Sequence[str]] = []
    for one, row in zip(best, raw, strict=True):
        if row["answers"]:
            scored.append(one.text)
            references.append(row["answers"])
    scores = score(scored, references)
    if search.num_answers == 1:
        return Answered(best, scores)
    return Answered(best, scores, [[one.text for one in of_row] for of_row in n_best])


def by_row(texts: Sequence[GeneratedText], search: Search) -> list[list[GeneratedText]]:
    """Split a flat list of answers, search.num_answers for each row, into a list for each row."""
    starts = range(0, len(texts), search.num_answers)
    return [list(texts[start : start + search.num_answers]) for start in starts]


@runtime_checkable
class Answers(Protocol):
    """The ability to answer rows by generation, for --do_extra_evals.

    Its raw rows hold `question` (text) and `answers` (the references, a list of texts).
    """

    def answer_tokens(self) -> int:
        """The most tokens of an answer, from the experiment."""
        ...

    def answers(
        self,
        model: nn.Module,
        rows: Sequence[Mapping[str, Any]],
        raw: Sequence[Row],
        *,
        search: Search = GREEDY,
        max_tokens: int | None = None,
    ) -> Answered:
        """Predictions and scores of encoded `rows`; `raw` are the same rows as text, and have only
        `question` and `answers`.

        max_tokens: the most tokens to generate, in place of what answer_tokens() allows, even if
        the experiment has a higher minimum. The memory plan uses it to generate a few tokens only;
        it can compute the cost of more.

        model: in evaluation mode, perhaps an engine. A forward may be a collective of all ranks,
        and ranks answer different rows. So with several ranks the number of forwards must not
        depend on the generated tokens. A row without references has a prediction and no score.
        ConfigError for a search that the task does not support.
        """
        ...


@runtime_checkable
class ContinuesPrompts(Protocol):
    """The ability to write texts behind prompts, for `predict` and the service, which take it by
    trainer/tasks/continuation.py.
    """

    @property
    def continues_prompts(self) -> bool:
        """Whether the model of this experiment does."""
        ...

    def prompt_ids(self, raw: Row, place: str) -> list[int]:
        """The token ids that the model continues, of a raw row with a prompt or a conversation."""
        ...


def continues(task: object) -> bool:
    """Whether a task has the ability, and its experiment a model that writes texts."""
    return isinstance(task, ContinuesPrompts) and task.continues_prompts


@runtime_checkable
class JudgesAnswers(Protocol):
    """The ability of a task that answers to compute its own scores.

    It is for rows that are not questions, or for which EM and F1 say little.
    """

    def question_row(self, row: Row) -> Row:
        """`question` (the text), `answers` (the references) and perhaps `id` of a raw row, in the
        form that `Answers.answers` takes.
        """
        ...

    def answer_scores(self, prediction: str, references: Sequence[str]) -> dict[str, float]:
        """The scores of one prediction against its references, of which there is at least one."""
        ...


def question_of(task: object, row: Row) -> Row:
    """`question`, `answers` and, if present, `id` and `dataset` of a raw row."""
    if isinstance(task, JudgesAnswers):
        return task.question_row(row)
    return {key: row[key] for key in ("id", "dataset", "question", "answers") if key in row}


@dataclass(frozen=True)
class ReplyText:
    """What a language model says behind a prompt."""

    text: str
    probability: float  # of the whole text, with the token that ends it


@runtime_checkable
class Replies(Protocol):
    """The ability of a language model to answer the rows that it is evaluated on: a row then is a
    prompt and what should follow it.
    """

    def reply_row(self, encoded: Mapping[str, Any]) -> Row | None:
        """`ids` (of all that stands before the last answer), `is_turn` (whether that is a
        conversation), `reference` (the text of the answer) and `reference_tokens` of an encoded
        row. None for a row without such an answer, or of which a limit may have cut it.
        """
        ...

    def replies(self, model: nn.Module, rows: Sequence[Row], *, max_tokens: int) -> list[ReplyText]:
        """The likeliest texts behind rows of reply_row(), of at most max_tokens tokens."""
        ...


@runtime_checkable
class ScoresPassages(Protocol):
    """The ability to score how much the model used each passage of a row.

    Its raw rows hold `ctxs`, the passages.
    """

    def passage_scores(
        self, model: nn.Module, rows: Sequence[Mapping[str, Any]]
    ) -> list[list[float]]:
        """One score per passage of each encoded row, higher for a passage that the model used more.
        model: as for answers().
        """
        ...


class EncodedRows(Protocol):
    """What a task reads of the token store of a split."""

    lengths: Any  # (rows,)

    @property
    def digest(self) -> str: ...  # of the raw rows and the encoding id

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Mapping[str, Any]: ...


@runtime_checkable
class ComparesWithStart(Protocol):
    """The ability to learn from a comparison with the model that a run begins with. What that model
    says of each row is computed once and stored, so that no second model lies in memory.
    """

    def read_start(
        self,
        start: Callable[[], nn.Module],
        stores: Mapping[str, EncodedRows],
        *,
        batch: int,
    ) -> None:
        """Compute what is not stored yet of the rows of these splits, and have collate() give it to
        them from now on. A collective.

        start: gives the model that the run begins with, in evaluation mode; it is called where
        something is missing. batch: rows per device and forward.
        """
        ...


@runtime_checkable
class LearnsFromTeacher(Protocol):
    """The ability to learn what a trained model says of each row (the key `teacher`, which may be
    missing). It reads the rows once, before the model that is trained is in memory.
    """

    cfg: Any

    def task_of_teacher(self) -> Task:
        """The teacher's task."""
        ...

    def teacher_fingerprint(self) -> str | None:
        """Names the teacher's weights; None without a teacher. ConfigError when it is not there, or
        cannot teach this model.
        """
        ...

    def read_teacher(self, stores: Mapping[str, EncodedRows], *, batch: int) -> None:
        """Have the teacher read what is not stored yet of the rows of these splits, and collate()
        give what it says from now on. A collective. batch: rows per device and forward.
        """
        ...

    def likeliest(self, model: nn.Module, batch: Batch) -> Any:
        """What the teacher's model says of a batch that its task has collated."""
        ...


@runtime_checkable
class ReadsContexts(Protocol):
    """The ability to replace the context of a row by that of another row, which shows how much the
    answers depend on the context.
    """

    def under_another_context(self, encoded: Mapping[str, Any]) -> Mapping[str, Any]:
        """An encoded evaluation row with the context of another row; ConfigError without one."""
        ...


Side = Literal["query", "passage"]


@runtime_checkable
class Embeds(Protocol):
    """The ability to compute vectors of queries and passages. The dot product of a query and a
    passage is their relevance.
    """

    def ids(self, texts: Sequence[Row], *, side: Side) -> list[list[int]]:
        """Token ids as `embed` takes them, cut to the side's limit. texts: {"text"} of a query,
        {"title", "text"} of a passage (title optional).
        """
        ...

    def embed(self, model: nn.Module, rows: Sequence[Sequence[int]], *, side: Side) -> Tensor:
        """(N, D) fp32 vectors of N token rows, on the model's device. model: in evaluation mode."""
        ...

    def shorten(self, model: nn.Module, dims: int) -> None:
        """From now on embed() gives the first `dims` numbers of each vector of the model, of
        length 1 if whole vectors have it. ConfigError where vectors have fewer.
        """
        ...

    def keep_layers(self, model: nn.Module, count: int) -> None:
        """Remove all but the first `count` blocks of the model's base. ConfigError where it has
        fewer.
        """
        ...


@dataclass(frozen=True)
class TokenVectors:
    """The vectors of N texts, of which each has one for some of its tokens."""

    vectors: Tensor  # (K, E), those of one text after the other
    lengths: Tensor  # (N,) how many each text has, at least one


@runtime_checkable
class EmbedsTokens(Protocol):
    """The ability to compute a vector for each token of queries and passages. Their relevance is
    that of late interaction (models/lean/maxsim.py).
    """

    late: Any  # the block of the experiment, or of the export that was read

    def ids(self, texts: Sequence[Row], *, side: Side) -> list[list[int]]:
        """As Embeds.ids."""
        ...

    def token_vectors(
        self, model: nn.Module, rows: Sequence[Sequence[int]], *, side: Side
    ) -> TokenVectors:
        """The fp32 vectors of N token rows, on the model's device. model: in evaluation mode."""
        ...


@runtime_checkable
class EmbedsWords(Protocol):
    """The ability to compute weights of the words of a vocabulary for queries and passages, most of
    them 0. The dot product of a query's and a passage's is their relevance.
    """

    def ids(self, texts: Sequence[Row], *, side: Side) -> list[list[int]]:
        """As Embeds.ids."""
        ...

    def embed_words(self, model: nn.Module, rows: Sequence[Sequence[int]], *, side: Side) -> Tensor:
        """(N, V) fp32 weights of N token rows, on the model's device. model: in evaluation mode."""
        ...


# The ids of a query, and of each of its passages.
IdLists = tuple[Sequence[int], Sequence[Sequence[int]]]


@runtime_checkable
class Reranks(Protocol):
    """The ability to score passages for a query, each pair by itself."""

    def lists_of(self, texts: Sequence[tuple[str, Sequence[Row]]]) -> list[IdLists]:
        """The ids of queries with their passages, cut to the limits, as `relevance` takes them. A
        passage is {"title"?, "text"}.
        """
        ...

    def relevance(self, model: nn.Module, lists: Sequence[IdLists]) -> Tensor:
        """(P,) fp32 scores of all pairs, list by list, on the model's device. model: in evaluation
        mode.
        """
        ...


@runtime_checkable
class Shapes(Protocol):
    """The ability to say which fields of a row are padded, so that batches have little padding."""

    def padded_fields(self) -> Sequence[str]:
        """The encoded fields that are padded separately; `length` is the sum of their ids."""
        ...

    def kind_field(self) -> str | None:
        """The encoded field, of one number per row, by which rows are sorted, highest first. With
        micro_tokens a micro-batch has only rows of equal value. None: no such field.
        """
        ...


@runtime_checkable
class Packs(Protocol):
    """The ability to pack a micro-batch into one stream of rows without padding."""

    @property
    def is_packed(self) -> bool:
        """Whether this experiment packs its micro-batches."""
        ...


@dataclass(frozen=True)
class RankPlace:
    """The place of a rank among the neighbours that share the tokens of a row."""

    number: int = 0
    ranks: int = 1


ALONE = RankPlace()


@runtime_checkable
class SharesRows(Protocol):
    """The ability to divide the tokens of a batch among neighbouring ranks (sequence
    parallelism).
    """

    def sharing_problems(self, ranks: int) -> list[str]:
        """Why so many ranks cannot share a row of this experiment, a sentence for each reason; []:
        they can.
        """
        ...

    def share(self, batch: Batch, place: RankPlace) -> Batch:
        """What the rank at this place reads of a batch from `collate`. The losses and units of all
        places add up to those of the batch.
        """
        ...


def refuse_sharing(task: Task, ranks: int) -> None:
    """ConfigError where so many ranks cannot share a row."""
    if ranks > 1:
        assert isinstance(task, SharesRows), "training/run_plan.py refuses others"
        problems = task.sharing_problems(ranks)
        if problems:
            raise ConfigError("\n".join(problems))


def shared(task: Task, batch: Batch, place: RankPlace) -> Batch:
    """What the rank at this place reads of a batch: the batch itself where rows are not shared."""
    if place.ranks == 1:
        return batch
    assert isinstance(task, SharesRows), "training/run_plan.py refuses others"
    return task.share(batch, place)


@runtime_checkable
class ArrangesRows(Protocol):
    """The ability to say which rows belong together in a step."""

    def arrangement(self, store: Any, sources: tuple[int, ...]) -> Any:
        """The Arrangement (trainer/data/arranged) of the rows of a split's token store; None: any
        rows may share a step. sources: the rows of each source of a mix.
        """
        ...


@runtime_checkable
class Mixes(Protocol):
    """The ability to read rows from several sources (data.mix)."""

    cfg: Any
    unmixed: Task  # reads the split that no source has

    def sources(self, split: str) -> Mapping[str, Task]:
        """By the name of the source, the task that reads and encodes its rows of a split."""
        ...

    def rows_by_source(self, split: str) -> Iterator[Iterator[Row]]:
        """The raw rows of each source of a split, in the order of sources(); together they are
        Task.rows.
        """
        ...


@dataclass(frozen=True)
class Uncut:
    """A field of a row before its limit cuts it."""

    texts: list[list[int]]  # token ids before the cut
    limit: int | None  # the encoding keeps the first `limit` ids of each text; None: all
    setting: str  # the key of the experiment that sets the limit
    labels_from: int | None = None  # the index of the first label in each text; None: no labels
    holds_answers: bool = False  # whether the `answers` of the raw row are searched in the texts


@runtime_checkable
class ShowsCuts(Protocol):
    """The ability to give rows before limits cut them, for the truncation ledger."""

    def uncut_fields(self, row: Row) -> dict[str, Uncut]:
        """By name, the fields of a raw row that `encode` cuts, before the cut."""
        ...


class Trained(Protocol):
    """What trainer/tasks/<task>/trained.py may define: the use of a trained model."""

    def usage(self, cfg: Any, folder: Path) -> Usage:
        """How users load the export in `folder`."""
        ...

    def row_to_predict(self, task: Any, raw: Row, place: str) -> Row:
        """The row to predict for an object with our names of columns. Its answers are not read.

        DataError names `place`.
        """
        ...

    def cut_row(self, task: Any, model: nn.Module, row: Row, how: Prediction) -> CutRow:
        """What limits cut off a row of row_to_predict when it is predicted."""
        ...

    def predict(
        self, task: Any, model: nn.Module, rows: Sequence[Row], how: Prediction
    ) -> list[dict[str, Any]]:
        """The prediction for each row, as JSON values by name."""
        ...


@dataclass(frozen=True)
class CutRow:
    """What limits cut off a row that is predicted."""

    cuts: Mapping[str, Cut]  # by what people call the texts
    # what such rows are called if --strict refuses them: "prompts that are longer than ... (cut)".
    # A text that the encoding of its task cuts, as published, is none.
    doubts: Sequence[str] = ()

    @property
    def tokens(self) -> int:
        """How many tokens are cut off."""
        return sum(sum(cut.lost) for cut in self.cuts.values())


@dataclass(frozen=True)
class Prediction:
    """How rows are predicted."""

    search: Search = GREEDY
    max_tokens: int | None = None  # of a predicted text; None: the limit of the experiment


@dataclass(frozen=True)
class Usage:
    """How users load an exported model, for its model card."""

    library: str  # its name on the Hub: "transformers", "sentence-transformers", "peft"
    # (heading, Python code that loads the folder named FOLDER); the first is the usual way
    programs: list[tuple[str, str]]
    limits: list[str]  # whole sentences
