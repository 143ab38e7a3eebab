"""The scheduling core: sequences, blocks, steps; no torch here."""
