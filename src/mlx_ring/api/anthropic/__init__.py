"""Routes as Anthropic has them."""
