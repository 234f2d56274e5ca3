"""The pinned clang-format as a repository: @clang_format//:clang-format, which //tools:format runs."""

load("//third_party/wheels:wheels.bzl", "install_wheels")

def _impl(ctx):
    installed = install_wheels(ctx, "clang_format", "clang-format (a download of 1 MB, once per machine)")
    if installed.error:
        fail("could not install clang-format's wheel:\n" + installed.error)
    ctx.file("WORKSPACE", "")
    ctx.file("BUILD.bazel", 'exports_files(["clang-format"])\n')
    ctx.symlink(installed.site + "/clang_format/data/bin/clang-format", "clang-format")

clang_format_repository = repository_rule(
    implementation = _impl,
    attrs = {
        "requirements": attr.label(mandatory = True, allow_single_file = True, doc = "the pinned wheel, with hashes"),
        "_install": attr.label(default = "//third_party/wheels:install.sh"),
    },
    environ = ["TESSERA_CACHE_NUMBER", "XDG_CACHE_HOME", "HOME"],
)
