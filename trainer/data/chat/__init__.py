"""Conversations as token ids, for every task that learns what an assistant says."""
