"""Compiler options of our own targets; libtorch's headers come in with -isystem and stay silent."""

TESSERA_COPTS = [
    "-Wall",
    "-Wextra",
    "-Werror",
    # g++ 12 warns of padding bytes that a c10::SmallVector copies along with its elements.
    "-Wno-maybe-uninitialized",
]

# The code under test keeps its -O2; a test's own at -O1 compiles in three quarters of the time.
TEST_COPTS = TESSERA_COPTS + ["-O1"]
