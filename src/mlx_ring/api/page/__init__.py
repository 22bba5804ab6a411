"""The page at `/` that people use: its files, and to whom they are given."""
