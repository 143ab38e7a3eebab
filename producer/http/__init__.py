"""HTTP code that all APIs share: API keys, limits, bodies, errors, streams, metrics."""
