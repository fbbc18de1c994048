"""Batches of the OpenAI dialect: files of requests that are answered when people need no answer."""
