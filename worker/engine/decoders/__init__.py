"""promptq's decoders for models with known parts: in C++ for a CPU, in Triton for a GPU."""
