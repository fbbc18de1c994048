"""What a run tells: the console, metrics.jsonl, wandb, and the rates that they show."""
