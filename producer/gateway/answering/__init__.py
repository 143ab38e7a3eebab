"""From a call to its answer, whole or as a stream."""
