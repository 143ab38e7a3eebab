"""promptq's decoders for models of the Llama kind: in C++ for a CPU, in Triton for a GPU."""
