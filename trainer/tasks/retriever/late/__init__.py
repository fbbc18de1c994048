"""Late interaction: every token of a text becomes a vector, and texts are compared vector by vector
(ColBERT).
"""
