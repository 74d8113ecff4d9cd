"""MiMo-Audio: a language model of text and groups of audio codes, and the decoder of its audio tokenizer."""
