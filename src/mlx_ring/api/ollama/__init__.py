"""Ollama's API: `/api/...`, with streams of one JSON object a line, which are the default."""
