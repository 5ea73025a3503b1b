"""Text in the front end: tokenizer, chat template, incremental detokenizing, stop strings."""
