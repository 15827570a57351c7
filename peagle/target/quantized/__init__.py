"""A target in fewer bits, in the compressed-tensors layout that vLLM serves: written, and read."""
