"""paxtrain: GPT training over a (data, pipe, tensor) mesh."""
