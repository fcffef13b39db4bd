"""The ``holdfast`` command line, with one module for each subcommand."""
