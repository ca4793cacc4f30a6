"""Between text and token ids: tokenizer, chat templates, incremental detokenization, stop strings. Torch-free."""
