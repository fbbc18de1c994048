"""Which rows of a retriever share a step: data.batches."""
