"""An inference server without a model, which speaks like vLLM's or llama.cpp's and fails on demand.

Its answers and failures were recorded from the real servers (see `recorded`).
"""
