"""Layers that keep less for the backward pass than stock ones, with the same bits: what can be
computed again from tensors that are kept anyway is computed again.
"""
