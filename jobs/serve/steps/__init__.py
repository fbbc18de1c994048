"""The Tinker dialect: a client's own loop trains, step by step (docs/steps-over-http.md)."""
