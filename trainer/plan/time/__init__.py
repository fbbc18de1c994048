"""Predicts how long a run takes, and finds the fastest way to train that fits into memory."""
