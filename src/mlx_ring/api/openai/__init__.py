"""Routes as OpenAI has them."""
