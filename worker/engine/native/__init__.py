"""Native code for the CPU: a whole decoder as one call, compiled on this machine."""
