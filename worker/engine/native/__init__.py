"""Native code for the CPU, in C++: one call computes a step of the decoder."""
