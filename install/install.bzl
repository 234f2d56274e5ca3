"""What `//install` copies: all our objects in one library, and the headers that belong to it."""

load("@bazel_tools//tools/cpp:toolchain_utils.bzl", "find_cpp_toolchain")

def _is_ours(label):
    return label.workspace_name == "" and not label.package.startswith(("third_party", "tools"))

def _is_whole(label):
    """Whether all objects of a library are taken: of ours, and of fmt, which we compile for libtorch's headers."""
    return _is_ours(label) or (label.workspace_name == "libtorch" and label.name == "fmt")

def _merged(ctx):
    return cc_common.merge_cc_infos(cc_infos = [dep[CcInfo] for dep in ctx.attr.deps])

def _whole(ctx, library):
    toolchain = find_cpp_toolchain(ctx)
    return cc_common.create_library_to_link(
        actions = ctx.actions,
        feature_configuration = cc_common.configure_features(ctx = ctx, cc_toolchain = toolchain),
        cc_toolchain = toolchain,
        pic_static_library = library.pic_static_library,
        alwayslink = True,
    )

def _shared_file(library):
    return library.resolved_symlink_dynamic_library or library.dynamic_library

def _whole_archives_impl(ctx):
    info = _merged(ctx)
    inputs = []
    found = []
    for given in info.linking_context.linker_inputs.to_list():
        libraries = given.libraries
        named = []
        if _is_whole(given.owner):
            libraries = [_whole(ctx, library) for library in libraries]
        else:
            named = [_shared_file(library) for library in libraries if _shared_file(library)]
            named = [file for file in named if file.basename in ctx.attr.shared_libraries]
            libraries = [library for library in libraries if not _shared_file(library)]
            found += [file.basename for file in named]

        # As files, not as libraries: Bazel would add a RUNPATH to where they lie in the build. That of CUDA's libraries
        # is the program's (TesseraConfig.cmake.in).
        flags = [flag for flag in given.user_link_flags if not flag.startswith("-Wl,-rpath,")]
        inputs.append(cc_common.create_linker_input(
            owner = given.owner,
            libraries = depset(libraries),
            user_link_flags = depset(flags + [file.path for file in named]),
            additional_inputs = depset(given.additional_inputs + named),
        ))
    missing = [name for name in ctx.attr.shared_libraries if name not in found]
    if missing:
        fail("no dependency has the shared libraries " + ", ".join(missing))
    return [CcInfo(
        compilation_context = info.compilation_context,
        linking_context = cc_common.create_linking_context(linker_inputs = depset(inputs)),
    )]

# A cc_library of which a shared library takes all objects, also those that nobody names: op rules register themselves.
# Of the shared libraries behind `deps` it is linked with those that are named, by file name, and with no others: what
# these need they find themselves, wherever they lie.
whole_archives = rule(
    implementation = _whole_archives_impl,
    attrs = {
        "deps": attr.label_list(providers = [CcInfo]),
        "shared_libraries": attr.string_list(),
        "_cc_toolchain": attr.label(default = "@bazel_tools//tools/cpp:current_cc_toolchain"),
    },
    toolchains = ["@bazel_tools//tools/cpp:toolchain_type"],
    fragments = ["cpp"],
)

def _header_list_impl(ctx):
    headers = [file for file in _merged(ctx).compilation_context.headers.to_list() if file.is_source and _is_ours(file.owner)]
    output = ctx.actions.declare_file(ctx.label.name + ".txt")
    ctx.actions.write(output, "".join([file.short_path + "\n" for file in headers]))
    return [DefaultInfo(files = depset([output]), runfiles = ctx.runfiles([output] + headers))]

# A file with the paths of all headers of `deps`, which are in its runfiles.
header_list = rule(
    implementation = _header_list_impl,
    attrs = {"deps": attr.label_list(providers = [CcInfo])},
)
