"""Pretrained models: how they are loaded, changed, packed, and what their losses are."""
