"""The parts of the sampler, one step of its order each."""
