"""Who evaluates a function and its derivatives: JAX itself (the embedded default) or Julia."""
