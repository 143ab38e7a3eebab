"""One call of an API, without HTTP: from its fields to requests, from events to its answer."""
