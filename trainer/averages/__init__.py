"""Averages of weights: of the saved steps of a run, or of trained models."""
