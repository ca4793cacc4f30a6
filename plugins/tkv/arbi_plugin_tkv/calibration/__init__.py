"""What is learned from a model's own queries, keys and values, and the file that carries it."""
