"""What only --config=cuda builds: kernels and code over libtorch's CUDA half.

  cuda_library(name = "copy_kernels", srcs = ["copy_kernels.cu"], hdrs = ["copy_kernels.h"])
  cuda_cc_library(name = "copy", srcs = ["copy.cpp"], hdrs = ["copy.h"], cuda_deps = [":copy_kernels", TORCH_CUDA])

Without --config=cuda both are incompatible: `//...` leaves them out, and nothing behind cuda_deps is looked at. What
exists in both builds depends on them by if_cuda(), or through link_only where its own objects shall stay the same;
cuda_choice_library is that for one header with a source for each build.
"""

load("@bazel_tools//tools/cpp:toolchain_utils.bzl", "find_cpp_toolchain")
load(":cc.bzl", "tessera_library")
load(":copts.bzl", "TESSERA_COPTS", "TEST_COPTS")

TORCH_CUDA = "@libtorch//:torch_cuda"

def if_cuda(yes, no = []):
    """`yes` under --config=cuda, else `no`."""
    return select({
        "//third_party/cuda:enabled": yes,
        "//conditions:default": no,
    })

# target_compatible_with of targets that only --config=cuda builds.
ONLY_CUDA = if_cuda([], ["//third_party/cuda:needs_config_cuda"])

# Of targets that only a build without it has.
NOT_CUDA = if_cuda(["//third_party/cuda:needs_no_config_cuda"], [])

StringListInfo = provider("The value of a string_list_flag.", fields = ["values"])

def _string_list_flag_impl(ctx):
    return [StringListInfo(values = ctx.build_setting_value)]

string_list_flag = rule(
    implementation = _string_list_flag_impl,
    build_setting = config.string_list(flag = True),
    doc = "A flag with a list of strings, given with commas.",
)

def _code_for(architectures):
    """nvcc's options for machine code of each, and PTX of the last."""
    options = ["-gencode=arch=compute_{0},code=sm_{0}".format(a) for a in architectures]
    return options + ["-gencode=arch=compute_{0},code=compute_{0}".format(architectures[-1])]

def _include_paths(context):
    options = []
    for path in context.includes.to_list() + context.quote_includes.to_list():
        options += ["-I", path]
    for path in context.system_includes.to_list():
        options += ["-isystem", path]
    return options

def _compile(ctx, source, context, compiler):
    architectures = ctx.attr._architectures[StringListInfo].values
    if not architectures:
        fail("--//third_party/cuda:architectures: at least one is needed, such as 90")
    debug = ctx.var["COMPILATION_MODE"] == "dbg"
    output = ctx.actions.declare_file("_cuda/{}/{}.o".format(ctx.label.name, source.basename))
    arguments = ctx.actions.args()
    arguments.add_all(["-c", source, "-o", output, "-std=c++20", "-ccbin", compiler])
    arguments.add_all(_include_paths(context))
    arguments.add_all(["-O0", "-g"] if debug else ["-O3", "-DNDEBUG", "-lineinfo"])
    arguments.add("--compress-mode=size")  # line numbers are most of an object, and every program has it
    arguments.add_all(_code_for(architectures))
    arguments.add_all(["-Werror", "all-warnings", "-Xcompiler=-fPIC,-Wall,-Wextra,-Werror"])
    ctx.actions.run(
        executable = ctx.executable.nvcc,
        arguments = [arguments],
        inputs = depset([source] + ctx.files.hdrs, transitive = [context.headers]),
        outputs = [output],
        mnemonic = "NvccCompile",
        progress_message = "Compiling " + source.short_path,
        # nvcc calls the host's compiler, and writes in TMPDIR.
        use_default_shell_env = True,
    )
    return output

def _cuda_objects_impl(ctx):
    compiler = find_cpp_toolchain(ctx).compiler_executable
    context = cc_common.merge_cc_infos(cc_infos = [dep[CcInfo] for dep in ctx.attr.deps]).compilation_context
    return [DefaultInfo(files = depset([_compile(ctx, source, context, compiler) for source in ctx.files.srcs]))]

_cuda_objects = rule(
    implementation = _cuda_objects_impl,
    attrs = {
        "srcs": attr.label_list(allow_files = [".cu"]),
        "hdrs": attr.label_list(allow_files = [".h", ".cuh"]),
        "deps": attr.label_list(providers = [CcInfo]),
        # Given behind a select: what a rule names by itself would be fetched without --config=cuda too.
        "nvcc": attr.label(allow_single_file = True, executable = True, cfg = "host"),
        "_architectures": attr.label(default = "//third_party/cuda:architectures"),
        "_cc_toolchain": attr.label(default = "@bazel_tools//tools/cpp:current_cc_toolchain"),
    },
    toolchains = ["@bazel_tools//tools/cpp:toolchain_type"],
)

def cuda_library(name, srcs, hdrs = [], deps = [], **kwargs):
    """Kernels: sources for nvcc. Of libtorch they include <c10/util/BFloat16.h> and the like at most: with a tensor's
    headers nvcc takes half a minute a file.

    Args:
      name: as in cc_library.
      srcs: .cu files; warnings are errors. Paths are from the repository's root.
      hdrs: what other code includes; it may be compiled by g++.
      deps: libraries whose headers they include.
      **kwargs: passed to cc_library.
    """
    _cuda_objects(
        name = name + "_objects",
        srcs = srcs,
        hdrs = hdrs,
        nvcc = if_cuda("@cuda//:nvcc", None),
        deps = deps,
        target_compatible_with = ONLY_CUDA,
        visibility = ["//visibility:private"],
    )
    native.cc_library(
        name = name,
        srcs = [":{}_objects".format(name)],
        hdrs = hdrs,
        target_compatible_with = ONLY_CUDA,
        deps = deps + if_cuda(["@cuda//:headers"]),
        **kwargs
    )

def cuda_cc_library(name, cuda_deps, deps = [], copts = TESSERA_COPTS, **kwargs):
    """C++ that needs CUDA's headers or libtorch's CUDA half.

    Args:
      name: as in cc_library.
      cuda_deps: what is there only under --config=cuda.
      deps: as in cc_library.
      copts: as in cc_library.
      **kwargs: passed to cc_library.
    """
    native.cc_library(
        name = name,
        copts = copts,
        target_compatible_with = ONLY_CUDA,
        deps = deps + if_cuda(cuda_deps),
        **kwargs
    )

def _link_only_impl(ctx):
    merged = cc_common.merge_cc_infos(cc_infos = [dep[CcInfo] for dep in ctx.attr.deps])
    return [CcInfo(linking_context = merged.linking_context)]

link_only = rule(
    implementation = _link_only_impl,
    attrs = {"deps": attr.label_list(providers = [CcInfo])},
    doc = """Libraries that are linked without their headers, defines and include paths.

What depends on one compiles as if it were not there, so that its objects are those of a build without CUDA.""",
)

def cuda_choice_library(name, hdrs, with_cuda, without_cuda, cuda_deps, deps, cuda_only_deps = []):
    """What has one header, and one implementation under --config=cuda and another without.

    Use `<name>_headers` to include it and `<name>` to link it. Nothing that includes it is compiled in another way under
    --config=cuda. `<name>_with_cuda` is for tests that are built only there.

    Args:
      name: of what is linked.
      hdrs: what both implement.
      with_cuda: sources.
      without_cuda: sources, which need the headers alone.
      cuda_deps: what is there only under --config=cuda.
      deps: of the headers.
      cuda_only_deps: further deps of with_cuda.
    """
    headers = ":{}_headers".format(name)
    tessera_library(name = name + "_headers", hdrs = hdrs, deps = deps)
    cuda_cc_library(
        name = name + "_with_cuda",
        srcs = with_cuda,
        cuda_deps = cuda_deps,
        deps = [headers] + cuda_only_deps,
    )
    tessera_library(
        name = name + "_without_cuda",
        srcs = without_cuda,
        precompiled = "tensor",
        deps = [headers],
    )
    link_only(
        name = name,
        deps = if_cuda([":{}_with_cuda".format(name)], [":{}_without_cuda".format(name)]),
    )

def cuda_test_cases(name, srcs, cuda_deps, deps = []):
    """Test cases over CUDA, for the deps of a tessera_test under if_cuda(): linked into it, so that its own sources compile
    as they do without --config=cuda.

    Args:
      name: as in cc_library.
      srcs: as in cc_test.
      cuda_deps: as in cuda_cc_library.
      deps: as in cc_test; Catch2 is added.
    """
    cuda_cc_library(
        name = name + "_objects",
        testonly = True,
        srcs = srcs,
        copts = TEST_COPTS,
        alwayslink = True,
        cuda_deps = cuda_deps,
        visibility = ["//visibility:private"],
        deps = deps + ["//third_party/catch2"],
    )
    link_only(
        name = name,
        testonly = True,
        target_compatible_with = ONLY_CUDA,
        deps = if_cuda([":{}_objects".format(name)]),
    )
