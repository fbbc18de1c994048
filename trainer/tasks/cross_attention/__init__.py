"""Cross-attention layers inserted into a frozen decoder; only they train."""
