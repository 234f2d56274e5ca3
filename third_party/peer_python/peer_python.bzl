"""A Python with torch, safetensors, tokenizers, transformers and peft, for tests that compare with them.

@peer_python//:python is a program: CPython 3.11 with libtorch's own wheel, which @libtorch has installed already, and
the small packages of requirements.txt. Where that cannot be had (LIBTORCH names another libtorch, no CPython 3.11, no
pip), it says why and ends with status 77: tests are skipped then, with that line.
"""

load("//third_party/wheels:wheels.bzl", "install_wheels")

_PYTHON = """#!/bin/sh
LD_LIBRARY_PATH='{stand_ins}' PYTHONPATH='{torch}:{packages}' exec '{python}' "$@"
"""

_NO_PYTHON = """#!/bin/sh
cat >&2 <<'END'
{reason}
END
exit 77
"""

# 3 GB of CUDA libraries that the wheel's own name and nothing calls on a CPU.
_STAND_INS = [
    "libcublas.so.13",
    "libcublasLt.so.13",
    "libcudnn.so.9",
    "libcufft.so.12",
    "libcufile.so.0",
    "libcusolver.so.12",
    "libcusparse.so.12",
    "libcusparseLt.so.0",
    "libnccl.so.2",
    "libnvrtc.so.13",
    "libnvshmem_host.so.3",
]

_WHICH = """import sys
print(sys.executable if (sys.implementation.name, *sys.version_info[:2]) == ("cpython", 3, 11) else "")"""

def _find_python(ctx):
    """The path of a CPython 3.11, "" if there is none."""
    for name in ["python3.11", "python3", "/usr/bin/python3"]:
        python = name if name.startswith("/") else ctx.which(name)
        found = ctx.execute([python, "-c", _WHICH]).stdout.strip() if python else ""
        if found:
            return found
    return ""

def _make(ctx):
    """The program's text."""
    if ctx.os.environ.get("LIBTORCH", ""):
        return _NO_PYTHON.format(reason = "LIBTORCH is set, so torch's wheel is not installed")
    python = _find_python(ctx)
    if not python:
        return _NO_PYTHON.format(reason = "there is no CPython 3.11, which the pinned torch wheel is for")
    torch = ctx.path(Label("@libtorch//:site/torch/version.py")).realpath.dirname.dirname
    installed = install_wheels(ctx, "peer_python", "Python packages for tests (a download of 50 MB, once per machine)")
    if installed.error:
        reason = "pip could not install the packages of third_party/peer_python; once it can, run " + \
                 "./bazelw sync --only=peer_python:\n" + installed.error
        return _NO_PYTHON.format(reason = reason)
    made = ctx.execute([ctx.path(ctx.attr._stand_ins), "{}/torch/lib".format(torch), "stand_ins"] + _STAND_INS)
    if made.return_code:
        fail("third_party/peer_python: no stand-ins for CUDA's libraries:\n" + made.stderr)
    return _PYTHON.format(python = python, torch = torch, packages = installed.site, stand_ins = ctx.path("stand_ins"))

def _impl(ctx):
    ctx.file("WORKSPACE", "")
    ctx.file("BUILD.bazel", 'exports_files(["python"])\n')
    ctx.file("python", _make(ctx), executable = True)

peer_python_repository = repository_rule(
    implementation = _impl,
    attrs = {
        "requirements": attr.label(mandatory = True, allow_single_file = True, doc = "the pinned wheels, with hashes"),
        "_install": attr.label(default = "//third_party/wheels:install.sh"),
        "_stand_ins": attr.label(default = "//third_party/cuda:stand_ins.sh"),
    },
    environ = ["LIBTORCH", "TESSERA_CACHE_NUMBER", "XDG_CACHE_HOME", "HOME"],
)
