"""Ollama's API: `/api/...`, where a stream is a JSON object in each line, and streaming is what happens unless told not to."""
