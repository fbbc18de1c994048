"""The one set of readers of raw files: rules for lines, encodings, names of keys and errors."""
