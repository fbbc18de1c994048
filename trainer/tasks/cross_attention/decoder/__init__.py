"""The decoder with inserted cross-attention layers."""
