"""Chats, the same for every dialect."""
