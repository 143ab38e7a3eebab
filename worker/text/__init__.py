"""Converts between text and token ids: tokenizer, detokenizer, chat templates, grammars."""
