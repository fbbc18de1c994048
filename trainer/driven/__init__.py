"""The loop of a driven run: operations that a client sends, one after another, on our engine."""
