"""Routes for people and machines that look after the service."""
