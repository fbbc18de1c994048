"""Sums that merge over ranks, and similarities of texts."""
