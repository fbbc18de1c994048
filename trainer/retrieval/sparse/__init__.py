"""Weights of words on the disk, and exact search among them by an inverted index."""
