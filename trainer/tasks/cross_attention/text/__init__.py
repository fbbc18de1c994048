"""What the decoder reads: questions, contexts, prompts."""
