"""The sampler. Each module is one step of sampling."""
