"""A plugin for vLLM. Servers that workers start have this folder on their `PYTHONPATH`."""
