"""The commands of the command line, one module each; every one has `main(arguments)` and returns the exit code."""
