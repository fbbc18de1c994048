"""What a retriever is trained to lower."""
