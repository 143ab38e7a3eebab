"""Memory, number formats and copies of the device."""
