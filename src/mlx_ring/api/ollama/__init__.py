"""Ollama's API: `/api/...`. Answers are streamed by default, with one JSON object per line."""
