"""Forms that read queries and passages apart from each other."""
