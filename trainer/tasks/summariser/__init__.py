"""Summaries of documents, written by a T5."""
