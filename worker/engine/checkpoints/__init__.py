"""Checkpoints that other tools quantized."""
