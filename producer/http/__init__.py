"""HTTP functions that all APIs use: keys, limits, bodies, errors, streams, measurements."""
