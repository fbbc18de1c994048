"""Neighbouring ranks that share a stream of tokens: sequence parallelism."""
