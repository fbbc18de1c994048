"""Driven runs that share one frozen base, its process and its forward; each has its own adapters."""
