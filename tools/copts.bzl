"""Compiler options of our own targets; libtorch's headers come in with -isystem and stay silent."""

TESSERA_COPTS = [
    "-Wall",
    "-Wextra",
    "-Werror",
    # g++ 12 warns of padding bytes that a c10::SmallVector copies along with its elements.
    "-Wno-maybe-uninitialized",
    # g++ takes what a batch puts together (tools/batches.bzl) for headers, in which a class may not have a member of a
    # type of an anonymous namespace. Classes that a source defines for itself may.
    "-Wno-subobject-linkage",
]

# The code under test keeps its -O2; a test's own at -O1 compiles in three quarters of the time.
TEST_COPTS = TESSERA_COPTS + ["-O1"]
