"""One call of an API, without HTTP: from the call's fields to payloads, and from events to its
answer."""
