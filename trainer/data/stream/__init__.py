"""Training rows that are encoded while they are trained on (data.stream)."""
