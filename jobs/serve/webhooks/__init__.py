"""Webhooks: what ended is told to the addresses of the configuration, signed as OpenAI does."""
