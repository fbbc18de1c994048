"""haven-ai over our folders and our submission: its launcher, its job manager, its notebooks."""
