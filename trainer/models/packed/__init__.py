"""Sequences without padding: their layout, their attention, T5's encoder on them."""
