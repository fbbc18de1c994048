"""Vectors of tokens: on the disk, pooled, and searched by late interaction."""
