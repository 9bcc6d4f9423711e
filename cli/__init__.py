"""The command line: one verb a file, a thin layer over the library."""

if __name__ != "reshard.cli":
    raise ImportError("this package is imported as reshard.cli")
