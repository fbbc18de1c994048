"""Lathe: fine-tune large models with DeepSpeed from one plain dictionary."""
