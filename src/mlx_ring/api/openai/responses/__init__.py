"""`/v1/responses`, without stored conversations: each request contains the whole one."""
