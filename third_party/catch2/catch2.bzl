"""The machine's Catch2 as a repository: version 2 is header-only, version 3 has a library to link."""

_BUILD = """
cc_library(
    name = "catch2",
    testonly = True,
    linkopts = {linkopts},
    visibility = ["//visibility:public"],
)
"""

def _impl(ctx):
    is_version_3 = ctx.path("/usr/include/catch2/catch_all.hpp").exists
    if not is_version_3 and not ctx.path("/usr/include/catch2/catch.hpp").exists:
        fail("Catch2 is not installed: ./bazelw installs it (Debian package catch2)")
    ctx.file("WORKSPACE", "")
    ctx.file("BUILD.bazel", _BUILD.format(linkopts = ["-lCatch2"] if is_version_3 else []))

# `configure`: looked up again after `bazelw sync --configure`, as for the C++ toolchain.
catch2_repository = repository_rule(
    implementation = _impl,
    configure = True,
    local = True,
)
