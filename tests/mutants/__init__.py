"""One-line faults that the tests must notice, and the command that tries them: `make mutants`."""
