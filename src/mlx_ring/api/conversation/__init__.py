"""A chat, whatever dialect asks for it: OpenAI's two, Anthropic's and Ollama's are written over this."""
