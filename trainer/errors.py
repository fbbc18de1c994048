"""The error tree. Every error says what was got, what is wanted and how to fix it; trainval.py
exits with its code.

LatheError             1  something went wrong that no dictionary can mend
├── UserError          2  bad input: the same command fails the same way until somebody changes
                       something
│   ├── ConfigError       an experiment dictionary, a flag or a DeepSpeed file
│   ├── DataError         a data file or a row of it (file and line are named)
│   ├── ResumeError       a run folder of another dictionary, other data or another base model
│   │   └── HeldError     another process or worker has it now; later the same command goes on
│   ├── StorageError      the disk: full, read-only, or not there
│   └── DoesNotFitError   a device has less memory than the run needs
├── CheckpointError    1  a checkpoint that is torn or altered
├── RankLostError      1  another rank was killed, or has not been heard of for minutes
├── ReplayDiffers      1  an operation of a driven run that was run again gave another result
├── ProofError         1  a run's record, or an engine, does not do what it says
└── DivergedError      1  the loss or the gradient is not a finite number any more
"""

import difflib

_MAX_LISTED = 60  # legal names in one message

EXIT_OK = 0
EXIT_BAD_INPUT = 2
EXIT_PAUSED = 10  # --until stopped the run at its step: it is saved, and not done
EXIT_REFUSED = 11  # `judge --gate`: something of the gate does not hold
EXIT_PREEMPTED = 75  # sysexits.h EX_TEMPFAIL: run the same command again
# The ranks of a run that ends with one of these have all come to the same point.
IN_ORDER = (EXIT_OK, EXIT_PAUSED, EXIT_PREEMPTED)


class LatheError(Exception):
    """Root of every error that Lathe raises on purpose."""

    exit_code = 1
    is_of_all_ranks = False  # every rank raises it in the same place


class UserError(LatheError):
    """Bad input. Never worth a retry."""

    exit_code = EXIT_BAD_INPUT


class ConfigError(UserError):
    """An experiment dictionary, a command-line flag or a DeepSpeed file is wrong."""


class DataError(UserError):
    """A data file is missing, empty or malformed, or a row of it.

    place, field: of the row, "train.jsonl, line 3" and "messages[0].role"; None where no row, or no
    field of it, is wrong.
    """

    def __init__(self, message: str, *, place: str | None = None, field: str | None = None) -> None:
        super().__init__(message)
        self.place = place
        self.field = field


class ResumeError(UserError):
    """The run folder was written by another dictionary, other data or another base model."""


class HeldError(ResumeError):
    """Another process or worker has the folder now. Later the same command goes on."""


class StorageError(UserError):
    """The disk refused a write."""


class DoesNotFitError(UserError):
    """A device has less memory than the run needs, by the plan or in fact."""


class CheckpointError(LatheError):
    """A checkpoint is torn or altered."""


class RankLostError(LatheError):
    """Another rank of the run is gone: the same command goes on from the last checkpoint."""


class ReplayDiffers(LatheError):
    """An operation of a driven run that was run again gave another result."""


class ProofError(LatheError):
    """A run's record is not what the run computes, or an engine not what plain torch computes."""


class DivergedError(LatheError):
    """The loss or the gradient norm is NaN or infinite."""

    is_of_all_ranks = True  # it is judged by sums over them


def nearest(name: str, legal: list[str]) -> str:
    """A sentence that names the legal spelling nearest to `name`, or all when none is near: of very
    many the first ones.
    """
    alike = [one for one in legal if one.casefold() == name.casefold()]
    close = alike or difflib.get_close_matches(name, legal, n=1, cutoff=0.6)
    if close:
        return f"Did you mean {close[0]!r}?"
    more = len(legal) - _MAX_LISTED
    rest = f" and {more} more" if more > 0 else ""
    return f"Legal: {', '.join(legal[:_MAX_LISTED])}{rest}."
