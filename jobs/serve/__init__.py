"""The service: an HTTP server over run folders. It keeps no truth, and imports no torch."""
