"""Texts of a language model for the service: what a request asks, and the pieces of the answer."""
