"""The parts of the sampler. Each module does one step of sampling."""
