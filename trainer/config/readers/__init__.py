"""Readers of files that people write by hand: JSON without twins, YAML, groups. No torch."""
