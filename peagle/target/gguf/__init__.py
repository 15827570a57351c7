"""GGUF files as targets: weights as stored, config and tokenizer by transformers."""
