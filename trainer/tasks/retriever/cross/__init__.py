"""The cross-encoder: one model reads a query together with a passage, and scores the pair."""
