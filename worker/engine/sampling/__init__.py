"""The parts of the sampler. Each does one of its steps."""
