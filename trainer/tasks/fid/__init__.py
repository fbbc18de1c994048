"""Fusion-in-Decoder: a T5 that encodes every passage of a question alone and decodes over all of
them.
"""
