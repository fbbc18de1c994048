"""The Tinker dialect: training driven by a client's own loop, over HTTP (docs/steps-over-http.md)."""
