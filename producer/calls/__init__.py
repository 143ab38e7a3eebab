"""One call of an API, without HTTP: from its fields to payloads, from events to its answer."""
