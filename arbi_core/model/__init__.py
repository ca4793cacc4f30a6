"""Building blocks of models: linears, norms, rotary embeddings, the decoder skeleton. Import from the submodules."""
