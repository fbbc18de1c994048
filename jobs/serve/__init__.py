"""The service: an HTTP server over run folders. All its state is files; it imports no torch."""
