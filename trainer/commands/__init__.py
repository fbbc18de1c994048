"""The commands of `python -m trainer`; each file holds related ones."""
