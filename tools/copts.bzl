"""Compiler options of our own targets; libtorch's headers come in with -isystem and stay silent."""

TESSERA_COPTS = [
    "-Wall",
    "-Wextra",
    "-Werror",
]
