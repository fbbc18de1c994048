"""The commands that read folders of vectors."""
