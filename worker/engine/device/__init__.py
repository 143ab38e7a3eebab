"""Memory and number formats of the device, and copies to the device and back."""
