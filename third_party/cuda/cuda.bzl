"""CUDA as an external repository, for --config=cuda: nvcc, headers, and where libtorch's CUDA half finds its libraries.

The toolkit is CUDA_HOME's, else that of nvcc on PATH, else the pinned wheels of requirements.txt, which have all
libraries as well. It must be of the CUDA version (the number before the dot) that libtorch is for.

NCCL's header must be exactly the one that libtorch was built with: c10d's classes hold NCCL's configuration by value,
and its size changes from version to version. libtorch's own packages, the toolkit and /usr/include are looked at for
it, then the pinned wheel of nccl_requirements.txt.

Of the libraries that libtorch's CUDA half names, three are for parts of it that Tessera never calls. Where they are
missing, stand-ins take their place (stand_ins.sh). A build fails where another one is missing, and says what to
install.
"""

load("//third_party/wheels:wheels.bzl", "install_wheels")

# GPUDirect Storage, structured sparsity, symmetric memory over NVSHMEM.
_NEVER_CALLED = ["libcufile.so.0", "libcusparseLt.so.0", "libnvshmem_host.so.3"]

def _number(text, before):
    """The digits and dots in `text` that follow `before`, "" if there are none."""
    number = ""
    for c in text.partition(before)[2].elems():
        if not (c.isdigit() or c == "."):
            break
        number += c
    return number

def _torch_home(ctx):
    header = ctx.path(Label("@libtorch//:site/torch/include/torch/headeronly/version.h")).realpath
    home = header.dirname.dirname.dirname.dirname
    if not home.get_child("lib").get_child("libtorch_cuda.so").exists:
        fail("{}: it has no lib/libtorch_cuda.so; --config=cuda needs a libtorch for CUDA".format(home))
    return home

def _needed_libraries(ctx, library):
    if not library.exists:
        return []
    result = ctx.execute(["readelf", "--dynamic", "--wide", library])
    if result.return_code:
        fail("third_party/cuda: readelf (Debian package binutils) cannot read {}:\n{}".format(library, result.stderr))
    return [
        line.partition("[")[2].partition("]")[0]
        for line in result.stdout.split("\n")
        if "(NEEDED)" in line
    ]

def _cuda_libraries(ctx, torch):
    names = []
    for library in ["libtorch_cuda.so", "libc10_cuda.so", "libtorch_nvshmem.so", "libtorch_cuda_linalg.so"]:
        for name in _needed_libraries(ctx, torch.get_child("lib").get_child(library)):
            if name not in names and (name.startswith("libcu") or name.startswith("libnv") or name.startswith("libnccl")):
                names.append(name)
    return names

def _check_version(ctx, nvcc, wanted):
    found = _number(ctx.execute([nvcc, "--version"]).stdout, "release ")
    if found.split(".")[0] != wanted:
        fail(("{} is of CUDA {}, but libtorch is for CUDA {}. Set CUDA_HOME to a toolkit {}.x, or unset it and take " +
              "nvcc from PATH: pinned wheels are used then").format(nvcc, found or "of unknown version", wanted, wanted))

def _find_toolkit(ctx, wanted):
    """The folder that has bin/nvcc."""
    given = ctx.os.environ.get("CUDA_HOME", "")
    if given and not given.startswith("/"):
        fail("CUDA_HOME={}: give the absolute path of a CUDA toolkit {}.x, or unset it".format(given, wanted))
    if given and not ctx.path(given + "/bin/nvcc").exists:
        fail(("CUDA_HOME={}: it has no bin/nvcc; give the path of a CUDA toolkit {}.x, or unset it: nvcc on PATH or " +
              "pinned wheels are used then").format(given, wanted))
    nvcc = ctx.path(given + "/bin/nvcc") if given else ctx.which("nvcc")
    if nvcc:
        home = nvcc.realpath.dirname.dirname
    else:
        installed = install_wheels(ctx, "cuda", "CUDA's compiler and libraries (a download of 2 GB, once per machine)")
        if installed.error:
            fail("there is no nvcc on PATH, CUDA_HOME is not set, and pip could not install CUDA's wheels:\n" + installed.error)
        home = ctx.path(installed.site + "/nvidia/cu" + wanted)
    _check_version(ctx, home.get_child("bin").get_child("nvcc"), wanted)
    return home

def _nccl_version(ctx, home):
    """Of <home>/include/nccl.h, "" if there is none."""
    header = home.get_child("include").get_child("nccl.h")
    if not header.exists:
        return ""
    text = ctx.read(header)
    return ".".join([_number(text, "#define NCCL_{} ".format(part)) for part in ["MAJOR", "MINOR", "PATCH"]])

def _nccl_of_torch(ctx, torch):
    """The version that the wheel's metadata names, "" for a libtorch that is none."""
    for folder in torch.dirname.readdir():
        if folder.basename.startswith("torch-") and folder.basename.endswith(".dist-info"):
            metadata = folder.get_child("METADATA")
            return _number(ctx.read(metadata), "Requires-Dist: nvidia-nccl-cu13==") if metadata.exists else ""
    return ""

def _find_nccl(ctx, torch, toolkit):
    """The folder that has include/nccl.h."""
    wanted = _nccl_of_torch(ctx, torch)
    seen = []
    for home in [ctx.path(str(torch.dirname) + "/nvidia/nccl"), toolkit, ctx.path("/usr")]:
        version = _nccl_version(ctx, home)
        if version and (version == wanted or not wanted):
            return home
        seen.append("{} ({})".format(home, version or "none"))
    if "nvidia-nccl-cu13=={} ".format(wanted) in ctx.read(ctx.attr.nccl_requirements):
        installed = install_wheels(ctx, "nccl", "NCCL (a download of 200 MB, once per machine)", ctx.attr.nccl_requirements)
        if installed.error:
            fail("pip could not install NCCL {}, which libtorch was built with:\n{}".format(wanted, installed.error))
        return ctx.path(installed.site + "/nvidia/nccl")
    fail(("{} was built with NCCL {}, and needs that version's nccl.h; looked at {}. Install it beside libtorch: " +
          "pip install --no-deps --target {} nvidia-nccl-cu13=={}").format(torch, wanted or "of unknown version", ", ".join(seen), torch.dirname, wanted or "<version>"))

def _library_folders(ctx, torch, nccl, toolkit):
    """Where libraries are looked for, in order."""
    folders = [torch.get_child("lib")]
    nvidia = torch.dirname.get_child("nvidia")
    if nvidia.exists:
        folders += [part.get_child("lib") for part in nvidia.readdir()]
    nvidia = toolkit.dirname
    if nvidia.basename == "nvidia":
        folders += [part.get_child("lib") for part in nvidia.readdir()]
    return folders + [nccl.get_child("lib"), toolkit.get_child("lib64"), toolkit.get_child("lib")]

def _locate(ctx, names, folders):
    """struct(folders: those in use, in order; found: path by name; missing: names)."""
    system = ctx.execute(["/sbin/ldconfig", "-p"]).stdout
    used, found, missing = [], {}, []
    for name in names:
        homes = [folder for folder in folders if folder.get_child(name).exists]
        if homes:
            used.append(str(homes[0]))
            found[name] = homes[0].get_child(name)
        elif "\t{} ".format(name) in system:
            found[name] = system.partition("\t{} ".format(name))[2].partition(" => ")[2].partition("\n")[0]
        else:
            missing.append(name)
    ordered = []
    for folder in folders:
        if str(folder) in used and str(folder) not in ordered:
            ordered.append(str(folder))
    return struct(folders = ordered, found = found, missing = missing)

def _link_headers(ctx, toolkit, nccl):
    for entry in toolkit.get_child("include").readdir():
        if not entry.basename.startswith("nccl"):
            ctx.symlink(entry, "include/" + entry.basename)
    ctx.symlink(nccl.get_child("include").get_child("nccl.h"), "include/nccl.h")

    # In toolkits of some packagings it is only here.
    nv = toolkit.get_child("include").get_child("cccl").get_child("nv")
    if not ctx.path("include/nv").exists:
        ctx.symlink(nv, "include/nv")

def _make_stand_ins(ctx, torch, missing):
    needed = [name for name in missing if name not in _NEVER_CALLED]
    if needed:
        fail(("third_party/cuda: not found: {}, which libtorch's CUDA half needs. Install them with NVIDIA's packages " +
              "or from PyPI (nvidia-cudnn-cu13, nvidia-nccl-cu13, nvidia-cublas and so on; what torch names is in its " +
              "METADATA) beside libtorch, or unset CUDA_HOME and take nvcc from PATH: pinned wheels, which have all of " +
              "them, are used then").format(", ".join(needed)))
    if not missing:
        return []
    made = ctx.execute([ctx.path(ctx.attr._stand_ins), torch.get_child("lib"), "stand_ins"] + missing)
    if made.return_code:
        fail("third_party/cuda: no stand-ins for {}:\n{}".format(", ".join(missing), made.stderr))

    # buildifier: disable=print
    print("CUDA: {} not found: stand-ins let programs start, and end one that calls them".format(", ".join(missing)))
    return [str(ctx.path("stand_ins"))]

def _impl(ctx):
    torch = _torch_home(ctx)
    names = _cuda_libraries(ctx, torch)
    runtime = [name for name in names if name.startswith("libcudart.so.")]
    if not runtime:
        fail("{}: its CUDA libraries do not name libcudart.so.<version>".format(torch))
    toolkit = _find_toolkit(ctx, runtime[0].split(".")[-1])
    nccl = _find_nccl(ctx, torch, toolkit)
    located = _locate(ctx, names, _library_folders(ctx, torch, nccl, toolkit))

    # libtorch opens more of its own libraries later, by name.
    folders = [str(torch.get_child("lib"))] + located.folders + _make_stand_ins(ctx, torch, located.missing)
    _link_headers(ctx, toolkit, nccl)
    ctx.file("nvcc", "#!/bin/sh\nexec '{}/bin/nvcc' \"$@\"\n".format(toolkit), executable = True)
    ctx.file("folders.txt", "".join([folder + "\n" for folder in folders if folder != str(torch.get_child("lib"))]))
    ctx.file("WORKSPACE", "")
    values = {
        "%{folders}": "".join(["        \"{}\",\n".format(f) for f in folders]),
        "%{runtime}": str(located.found[runtime[0]]),
    }
    ctx.template("BUILD.bazel", ctx.attr._build_file, values, executable = False)

# Looked up again after `bazelw sync --only=cuda`. Not `configure`, which `sync --configure` would fetch for everybody.
cuda_repository = repository_rule(
    implementation = _impl,
    attrs = {
        "requirements": attr.label(mandatory = True, allow_single_file = True, doc = "the pinned wheels, with hashes"),
        "nccl_requirements": attr.label(mandatory = True, allow_single_file = True, doc = "NCCL's, with hashes"),
        "_build_file": attr.label(default = "//third_party/cuda:cuda.BUILD"),
        "_install": attr.label(default = "//third_party/wheels:install.sh"),
        "_stand_ins": attr.label(default = "//third_party/cuda:stand_ins.sh"),
    },
    environ = ["CUDA_HOME", "LIBTORCH", "TESSERA_CACHE_NUMBER", "XDG_CACHE_HOME", "HOME"],
)
