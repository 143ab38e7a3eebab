"""Several models that take turns on one device."""
