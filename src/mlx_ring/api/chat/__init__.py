"""A chat, whichever dialect asks for it."""
