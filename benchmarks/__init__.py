"""All benchmarks. Each benchmark is one command, which prints one table."""
