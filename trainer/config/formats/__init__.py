"""Formats of rows, under their usual names: what each one holds, and which task reads it."""
