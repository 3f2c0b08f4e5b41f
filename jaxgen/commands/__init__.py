"""The subcommands of `jaxgen`, one a file: each has `run(args)`, which returns the exit code."""
