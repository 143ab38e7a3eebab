"""Native code for the CPU: each step of the decoder is one call of C++ code, compiled on this
machine."""
