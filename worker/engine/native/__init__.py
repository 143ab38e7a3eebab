"""Native code for the CPU: a whole decoder as one call, built with the compiler at hand."""
