"""An inference server without a model. It speaks like vLLM's, llama.cpp's or a cloud's, and fails
on demand.

Its answers and failures were recorded from the real servers (see `recorded`).
"""
