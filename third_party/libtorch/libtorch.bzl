"""libtorch as an external repository: the pinned wheel from the Python package index, or LIBTORCH=<dir>.

The wheel is installed once per version into ~/.cache/tessera (XDG_CACHE_HOME is honoured) and linked
from there, so that a second clone downloads nothing. Only the CUDA runtime stubs that libtorch_cpu.so
names are installed beside it: CPU use needs no full CUDA download.
"""

_BUILD = """
package(default_visibility = ["//visibility:public"])

cc_library(
    name = "torch",
    srcs = glob(
        [
            "site/torch/lib/libtorch_cpu.so",
            "site/torch/lib/libc10.so",
            "site/torch/lib/libgomp*.so*",
            "site/nvidia/cu*/lib/libcudart.so.*",
            "site/nvidia/cu*/lib/libcupti.so.*",
            "site/nvidia/cuda_runtime/lib/libcudart.so.*",
            "site/nvidia/cuda_cupti/lib/libcupti.so.*",
        ],
        exclude = ["site/nvidia/**/libcupti.so.*.*.*"],
    ),
    hdrs = glob([
        "site/torch/include/**/*.h",
        "site/torch/include/**/*.hpp",
    ]),
    defines = [
        "USE_DISTRIBUTED",
        "USE_C10D_GLOO",
        "FMT_HEADER_ONLY",
    ],
    includes = [
        "site/torch/include",
        "site/torch/include/torch/csrc/api/include",
    ],
)

# Real text that every set-up has: the default data of examples/train_gpt.
filegroup(
    name = "sources",
    srcs = glob(["site/torch/include/ATen/*.h"]),
)
"""

def _run(ctx, command, what):
    result = ctx.execute(command, timeout = 3600)
    if result.return_code:
        fail("{}: {}\n{}".format(what, " ".join(command), result.stderr))

def _cache_dir(ctx):
    env = ctx.os.environ
    base = env.get("XDG_CACHE_HOME", "") or (env.get("HOME", "") and env["HOME"] + "/.cache")
    return base + "/tessera" if base else ""

def _install(ctx, target):
    wheels = ["torch==" + ctx.attr.version] + ctx.attr.runtime
    ctx.report_progress("installing libtorch {} (about 600 MB, once per machine)".format(ctx.attr.version))
    _run(
        ctx,
        ["python3", "-m", "pip", "install", "--quiet", "--no-deps", "--disable-pip-version-check", "--target", target] + wheels,
        "pip could not install libtorch; set LIBTORCH=<directory of an installed libtorch> to use another one",
    )

def _impl(ctx):
    home = ctx.os.environ.get("LIBTORCH", "")
    cache = _cache_dir(ctx)
    if home:
        if not ctx.path(home + "/include/torch").exists:
            fail("LIBTORCH={} is not a libtorch directory: it has no include/torch".format(home))
        ctx.symlink(home, "site/torch")
        nvidia = ctx.path(home).dirname.get_child("nvidia")
        if nvidia.exists:
            ctx.symlink(nvidia, "site/nvidia")
    elif not cache:
        _install(ctx, "site")
    else:
        site = "{}/libtorch-{}".format(cache, "-".join([ctx.attr.version] + [r.split("==")[1] for r in ctx.attr.runtime]))
        if not ctx.path(site).exists:
            # Two clones may install at once: each into a folder of its own, the first rename wins.
            staging = "{}.{}".format(site, ctx.execute(["mktemp", "-u", "XXXXXXXX"]).stdout.strip())
            _install(ctx, staging)
            ctx.execute(["mv", "-T", staging, site])
            ctx.execute(["rm", "-rf", staging])
        ctx.symlink(site, "site")
    ctx.file("WORKSPACE", "")
    ctx.file("BUILD.bazel", _BUILD)

libtorch_repository = repository_rule(
    implementation = _impl,
    attrs = {
        "version": attr.string(mandatory = True),
        "runtime": attr.string_list(),
    },
    environ = ["LIBTORCH", "XDG_CACHE_HOME", "HOME"],
)
