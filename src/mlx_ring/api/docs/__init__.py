"""The page at `/docs`: `/openapi.json` for people, without network and without build."""
