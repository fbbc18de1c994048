"""What can go wrong with a scheduler. The rest of the tree, and ConfigError, is in
trainer/errors.py.

LatheError
├── UserError
│   └── Refused      2  the scheduler looked at the job and said no: nothing was started
├── NotYet          1  the scheduler takes no more jobs for now: nothing was started
├── Unreachable      4  the scheduler cannot be seen; whatever was asked may or may not have
                     happened
├── SomeFailed       3  some experiments of the group could not be submitted or ended badly
└── NothingMatched   5  no experiment is what the command asked for
"""

from __future__ import annotations

from trainer.errors import LatheError, UserError

EXIT_SOME_FAILED, EXIT_UNREACHABLE, EXIT_NOTHING_MATCHED = 3, 4, 5


class Refused(UserError):
    """The scheduler refused a job, in its own words. The job did not start and never will."""


class NotYet(LatheError):
    """The scheduler takes no job now, because of a limit that passes by itself: a number of jobs.
    Nothing was started; the same job is taken later.
    """


class Unreachable(LatheError):
    """The scheduler cannot be seen. It says nothing about a job: a submission may have arrived."""

    exit_code = EXIT_UNREACHABLE


class SomeFailed(LatheError):
    """Some experiments of a group could not be submitted or ended badly; the others are fine."""

    exit_code = EXIT_SOME_FAILED


class NothingMatched(LatheError):
    """No experiment fits what was asked for."""

    exit_code = EXIT_NOTHING_MATCHED


# another copy of this attempt runs, or nobody waits for it any more: this one does nothing
EXIT_DUPLICATE = 76
