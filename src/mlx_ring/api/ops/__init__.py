"""Routes for operating and monitoring the service."""
