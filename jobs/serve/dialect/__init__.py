"""The OpenAI dialect: files, fine-tuning jobs, checkpoints, models, by room of the API."""
