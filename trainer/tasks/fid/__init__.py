"""Fusion-in-Decoder: a T5 that encodes each passage of a question alone and decodes over all."""
