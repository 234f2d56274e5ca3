"""libtorch as an external repository: the pinned wheels of requirements.txt, or LIBTORCH=<dir>.

The wheels are linked from where wheels.bzl installs them. LIBTORCH is the torch/ directory of an installed wheel or an
unpacked libtorch zip, version 2.11 to 2.15.
"""

load("//third_party/wheels:wheels.bzl", "install_wheels")

_OLDEST = (2, 11)
_NEWEST = (2, 15)

def _version(ctx, header):
    """(major, minor) as libtorch's version.h gives it."""
    numbers = {}
    for line in ctx.read(header).split("\n"):
        words = line.split(" ")
        if len(words) == 3 and words[0] == "#define":
            numbers[words[1]] = words[2]
    return (int(numbers["TORCH_VERSION_MAJOR"]), int(numbers["TORCH_VERSION_MINOR"]))

def _link_existing(ctx, given):
    if not given.startswith("/"):
        fail("LIBTORCH={}: give an absolute path".format(given))
    home = ctx.path(given).realpath
    header = home.get_child("include").get_child("torch").get_child("headeronly").get_child("version.h")
    if not header.exists:
        fail(("LIBTORCH={}: it has no include/torch/headeronly/version.h; give the torch/ directory of a pip " +
              "install or an unpacked libtorch zip, version 2.11 to 2.15").format(given))
    version = _version(ctx, header)
    if version < _OLDEST:
        fail("LIBTORCH={}: libtorch {}.{} is older than 2.11".format(given, version[0], version[1]))
    if version > _NEWEST:
        # buildifier: disable=print
        print("LIBTORCH={}: libtorch {}.{} is newer than 2.15, the newest that was tested".format(given, version[0], version[1]))
    ctx.symlink(home, "site/torch")
    nvidia = home.dirname.get_child("nvidia")
    if nvidia.exists:
        ctx.symlink(nvidia, "site/nvidia")

def _install_pinned(ctx):
    installed = install_wheels(ctx, "libtorch", "libtorch (a download of 550 MB, once per machine)")
    if installed.error:
        fail("could not install libtorch's wheels (set LIBTORCH=<dir> to use an installed libtorch):\n" + installed.error)
    ctx.symlink(installed.site, "site")

def _impl(ctx):
    given = ctx.os.environ.get("LIBTORCH", "")
    if given:
        _link_existing(ctx, given)
    else:
        _install_pinned(ctx)
    ctx.file("WORKSPACE", "")
    ctx.symlink(ctx.attr._build_file, "BUILD.bazel")
    ctx.symlink(ctx.attr._fmt, "fmt.cpp")

libtorch_repository = repository_rule(
    implementation = _impl,
    attrs = {
        "requirements": attr.label(mandatory = True, allow_single_file = True, doc = "the pinned wheels, with hashes"),
        "_build_file": attr.label(default = "//third_party/libtorch:libtorch.BUILD"),
        "_fmt": attr.label(default = "//third_party/libtorch:fmt.cpp"),
        "_install": attr.label(default = "//third_party/wheels:install.sh"),
    },
    environ = ["LIBTORCH", "TESSERA_CACHE_NUMBER", "XDG_CACHE_HOME", "HOME"],
)
