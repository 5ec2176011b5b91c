"""The subcommands of `tinyloop`, one a module."""
