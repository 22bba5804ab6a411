"""Plans from machines and models. Pure."""
