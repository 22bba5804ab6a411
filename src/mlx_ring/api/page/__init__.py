"""The page at `/` for people: its files, and the choice between the page and JSON."""
