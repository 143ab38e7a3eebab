"""Memory and number formats of the device, and copies to and from it."""
