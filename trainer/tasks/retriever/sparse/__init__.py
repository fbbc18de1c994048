"""The sparse retriever: a text becomes weights of the words of its base's vocabulary (SPLADE)."""
