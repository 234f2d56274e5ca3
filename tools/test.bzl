"""tessera_test: a cc_test as this project writes them."""

load(":copts.bzl", "TESSERA_COPTS")

def tessera_test(name, srcs, deps = [], ranks_as_processes = False, size = "small", data = [], tags = [], **kwargs):
    """A Catch2 test binary with our compiler options, the shared main and what the sanitizers read at run time.

    A test may take a minute (size "small") or five ("medium"), so that a hang fails soon.

    Args:
      name: as in cc_test.
      srcs: as in cc_test.
      deps: as in cc_test; the test's main and Catch2 are added.
      ranks_as_processes: ranks are processes of their own that talk over sockets. Such a test runs alone, since its
        time-outs must not depend on what else runs, and not under tsan, which watches one process's memory.
      size: as in cc_test.
      data: as in cc_test; the tsan suppressions are added.
      tags: as in cc_test.
      **kwargs: passed to cc_test.
    """
    native.cc_test(
        name = name,
        srcs = srcs,
        size = size,
        # The code under test keeps its -O2; a test's own at -O1 compiles in three quarters of the time.
        copts = TESSERA_COPTS + ["-O1"],
        data = data + ["//tools:tsan_suppressions.txt"],
        tags = tags + (["exclusive", "processes"] if ranks_as_processes else []),
        deps = deps + [
            "//testing:test_main",
            "//third_party/catch2",
        ],
        **kwargs
    )
