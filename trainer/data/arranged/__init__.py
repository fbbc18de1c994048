"""Rows that change their steps within an epoch, so that those of a step belong together."""
