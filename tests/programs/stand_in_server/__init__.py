"""An inference server without a model, which speaks like vLLM's or llama.cpp's and fails on demand.

What it says and how it fails was recorded from the real ones (see `recorded`).
"""
