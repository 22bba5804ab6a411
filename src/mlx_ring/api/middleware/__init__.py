"""Middleware around every route, from the outermost in: access log, metrics, guard, tracing, body memory."""
