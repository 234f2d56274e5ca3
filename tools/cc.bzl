"""cc_library, cc_binary and cc_test as this project writes them.

`precompiled` names the libtorch headers that most of a target's sources read: "tensor" (ATen), "module" (torch::nn too)
or None for what does without libtorch or with little of it. It only saves time (tools/pch/pch.bzl), as compiling several
sources at once does (tools/batches.bzl).
"""

load("//tools/pch:pch.bzl", "pch_copts", "pch_deps")
load(":batches.bzl", "SOURCES_PER_BATCH", "TEST_SOURCES_PER_BATCH", "batched")
load(":copts.bzl", "TESSERA_COPTS", "TEST_COPTS")

def _target(rule, copts, header, precompiled, deps, name, srcs = [], testonly = None, **kwargs):
    """A target of `rule` whose sources read the kind of header named by `precompiled`, built for these copts."""
    if precompiled:
        copts = copts + pch_copts(precompiled + header)
        deps = deps + pch_deps(precompiled + header)
    rule(
        name = name,
        srcs = batched(name, srcs, testonly, TEST_SOURCES_PER_BATCH if header == "_headers_of_tests" else SOURCES_PER_BATCH),
        testonly = testonly,
        copts = copts,
        deps = deps,
        **kwargs
    )

def tessera_library(name, precompiled = None, deps = [], **kwargs):
    """A cc_library with our compiler options, under tests/ with those of tests.

    Args:
      name: as in cc_library.
      precompiled: see above.
      deps: as in cc_library.
      **kwargs: passed to cc_library.
    """
    is_test_code = native.package_name().startswith("tests/")
    copts = TEST_COPTS if is_test_code else TESSERA_COPTS
    header = "_headers_of_tests" if is_test_code else "_headers"
    _target(native.cc_library, copts, header, precompiled, deps, name = name, **kwargs)

def tessera_binary(name, precompiled = None, deps = [], **kwargs):
    """A cc_binary with our compiler options.

    Args:
      name: as in cc_binary.
      precompiled: see above.
      deps: as in cc_binary.
      **kwargs: passed to cc_binary.
    """
    _target(native.cc_binary, TESSERA_COPTS, "_headers", precompiled, deps, name = name, **kwargs)

def tessera_test(
        name,
        srcs = [],
        precompiled = "module",
        deps = [],
        ranks_as_processes = False,
        size = "small",
        data = [],
        tags = [],
        **kwargs):
    """A Catch2 test binary with our compiler options, the shared main and what the sanitizers read at run time.

    A test may take a minute (size "small") or five ("medium"), so that a hang fails soon.

    Args:
      name: as in cc_test.
      srcs: as in cc_test.
      precompiled: see above.
      deps: as in cc_test; the test's main and Catch2 are added.
      ranks_as_processes: ranks are processes of their own that talk over sockets. Such a test does not run under tsan,
        which watches one process's memory.
      size: as in cc_test.
      data: as in cc_test; the tsan suppressions are added.
      tags: as in cc_test.
      **kwargs: passed to cc_test.
    """
    if ranks_as_processes and "shard_count" in kwargs:
        fail("ranks inherit the variables of a shard: " + name + " cannot have a shard_count")
    _target(
        native.cc_test,
        TEST_COPTS,
        "_headers_of_tests",
        precompiled,
        deps + [
            "//testing:test_main",
            "//third_party/catch2",
        ],
        name = name,
        srcs = srcs,
        size = size,
        data = data + ["//tools:tsan_suppressions.txt"],
        tags = tags + (["processes"] if ranks_as_processes else []),
        **kwargs
    )
