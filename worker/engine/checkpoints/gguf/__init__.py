"""Reads GGUF files of llama.cpp."""
