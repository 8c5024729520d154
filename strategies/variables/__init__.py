"""Variables: what they hold, where it is kept, how replicas' changes become one."""
