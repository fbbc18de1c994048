"""Chat templates: what their syntax tells, and renderings that tell where each turn stands."""
