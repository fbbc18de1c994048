"""The commands of `python -m trainer`, a file for each family of them."""
