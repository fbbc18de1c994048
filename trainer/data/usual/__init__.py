"""Rows in the formats of trainer/config/formats/table.py, read as rows with our own names."""
