"""A dense retriever: queries and passages become vectors whose dot product is relevance."""
