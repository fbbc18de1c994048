"""Decoders of transformers block by block, on rows with pads or on a stream without."""
