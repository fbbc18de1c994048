"""TRL 1.16, which runs beside us and tells what its SFTTrainer would learn of a conversation."""
