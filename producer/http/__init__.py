"""HTTP for all APIs: keys, limits, bodies, errors, streams, measurements."""
