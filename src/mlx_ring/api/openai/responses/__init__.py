"""`/v1/responses`, without a memory: each request brings the whole conversation."""
