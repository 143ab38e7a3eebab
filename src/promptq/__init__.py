"""A message-queue worker service for language-model inference: Redis is its API."""
