"""The one set of readers of raw files: their rules for lines, encodings, names of keys and
errors.
"""
