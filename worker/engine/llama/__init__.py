"""What decoders of our own need to know of models of the Llama kind."""
