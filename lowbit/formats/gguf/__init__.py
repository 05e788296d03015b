"""GGUF, the format of llama.cpp: the file, its blocks, models of the Llama family, tokenizers."""
