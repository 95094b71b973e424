"""Fitted constants of devices, one YAML a device and software stack."""
