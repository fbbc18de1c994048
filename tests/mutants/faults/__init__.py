"""The list: a file, a piece of it that stands there once, its replacement, what it would cost, and
the tests.
"""

from tests.mutants.faults import (
    agents,
    api,
    chat,
    data,
    device,
    exports,
    harness,
    jobs,
    judging,
    loop,
    optimizers,
    preferences,
    reliability,
    search,
    serve,
    streams,
    tasks,
    terminal,
    training,
)

FAULTS = [
    *loop.FAULTS,
    *training.FAULTS,
    *optimizers.FAULTS,
    *preferences.FAULTS,
    *tasks.FAULTS,
    *jobs.FAULTS,
    *judging.FAULTS,
    *data.FAULTS,
    *streams.FAULTS,
    *chat.FAULTS,
    *device.FAULTS,
    *serve.FAULTS,
    *terminal.FAULTS,
    *reliability.FAULTS,
    *search.FAULTS,
    *exports.FAULTS,
    *harness.FAULTS,
    *agents.FAULTS,
    *api.FAULTS,
]
