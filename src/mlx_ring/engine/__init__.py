"""The head's engine: scheduler, sequences, detokenizer, streams."""
