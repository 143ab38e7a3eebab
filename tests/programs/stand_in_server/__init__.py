"""An inference server without a model (the stand-in). It answers like vLLM's, llama.cpp's or
SGLang's server, or like a cloud's, and fails on demand.

The answers and failures were recorded from the real servers (see `recorded`).
"""
