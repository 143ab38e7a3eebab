"""Converts between text and token ids: tokenizer, detokenizer, grammars, tools."""
