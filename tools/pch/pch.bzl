"""Precompiled headers: g++ reads libtorch's headers once for all sources of a kind, not once a source.

Without them five sixths of a build is the compiler's reading of libtorch: torch/nn/module.h comes with 5,000 files. What
a header here includes is seen by every source compiled with it, so that an #include forgotten there goes unnoticed;
`--config=tidy`, which compiles without, finds it.
"""

load("@bazel_tools//tools/build_defs/cc:action_names.bzl", "CPP_COMPILE_ACTION_NAME")
load("@bazel_tools//tools/cpp:toolchain_utils.bzl", "find_cpp_toolchain")

def _compile_command(ctx, context, header, output):
    """The compiler's path and options, as for a source with these copts."""
    toolchain = find_cpp_toolchain(ctx)
    features = cc_common.configure_features(
        ctx = ctx,
        cc_toolchain = toolchain,
        requested_features = ctx.features,
        unsupported_features = ctx.disabled_features,
    )
    variables = cc_common.create_compile_variables(
        cc_toolchain = toolchain,
        feature_configuration = features,
        include_directories = context.includes,
        preprocessor_defines = context.defines,
        quote_include_directories = context.quote_includes,
        system_include_directories = context.system_includes,
        use_pic = True,
        user_compile_flags = ctx.fragments.cpp.copts + ctx.fragments.cpp.cxxopts + ctx.attr.copts,
    )
    options = cc_common.get_memory_inefficient_command_line(
        action_name = CPP_COMPILE_ACTION_NAME,
        feature_configuration = features,
        variables = variables,
    )
    compiler = cc_common.get_tool_for_action(action_name = CPP_COMPILE_ACTION_NAME, feature_configuration = features)
    return compiler, options + ["-x", "c++-header", "-c", header.path, "-o", output.path]

def _precompiled_header_impl(ctx):
    header = ctx.actions.declare_file(ctx.label.name + ".h")
    output = ctx.actions.declare_file(ctx.label.name + ".h.gch")
    context = cc_common.merge_cc_infos(cc_infos = [dep[CcInfo] for dep in ctx.attr.deps]).compilation_context
    compiler, options = _compile_command(ctx, context, header, output)
    also = "".join(["#include \"{}\"\n".format(file) for file in ctx.attr.also])
    ctx.actions.expand_template(template = ctx.file.header, output = header, substitutions = {"// {also}\n": also})
    ctx.actions.run(
        executable = compiler,
        arguments = options,
        inputs = depset([header], transitive = [context.headers]),
        outputs = [output],
        mnemonic = "PrecompileHeader",
        progress_message = "Precompiling " + ctx.file.header.short_path,
        # TESSERA_COMPILER is among it (bazelw): a precompiled header serves the very compiler that wrote it.
        use_default_shell_env = True,
    )
    own = cc_common.create_compilation_context(headers = depset([header, output]))
    return [CcInfo(compilation_context = own)]

precompiled_header = rule(
    implementation = _precompiled_header_impl,
    attrs = {
        "header": attr.label(mandatory = True, allow_single_file = [".h"], doc = "its #includes"),
        "also": attr.string_list(doc = "further headers, in place of the line // {also}"),
        "copts": attr.string_list(doc = "exactly those of the targets that use it"),
        "deps": attr.label_list(providers = [CcInfo], doc = "libraries whose headers it includes"),
        "_cc_toolchain": attr.label(default = "@bazel_tools//tools/cpp:current_cc_toolchain"),
    },
    doc = "A header as the compiler keeps it in memory after reading it: about half a gigabyte.",
    fragments = ["cpp"],
    toolchains = ["@bazel_tools//tools/cpp:toolchain_type"],
)

def _if_on(values):
    return select({"//tools/pch:on": values, "//conditions:default": []})

def pch_copts(name):
    """Options of a source that uses the precompiled header of this name."""
    return _if_on([
        "-include",
        "tools/pch/{}.h".format(name),
        # Said where g++ does not take it, say since it was written by another version; the header is read instead.
        "-Winvalid-pch",
        "-Wno-error=invalid-pch",
        # With so much in memory from the start, the compiler's garbage collections took an eighth of the time.
        "--param=ggc-min-heapsize=4000000",
    ])

def pch_deps(name):
    """The target to depend on."""
    return _if_on(["//tools/pch:" + name])
