"""clang-tidy as an aspect: `./bazelw build --config=tidy //...` checks the sources of our C++ targets.

Each file is an action of its own, so that results are cached and only changed files are checked again. Our headers
are checked through the sources that include them. `--//tools:tidy_only=base/error.cpp,...` checks these files alone.
"""

load(":cuda.bzl", "StringListInfo")

_SCRIPT = """
command -v clang-tidy >/dev/null || { echo "clang-tidy is not in $PATH: install Debian's clang-tidy" >&2; exit 1; }
stamp=$1; shift
clang-tidy --quiet "$@" >"$stamp" 2>&1 || { cat "$stamp" >&2; exit 1; }
"""

def _flags(ctx, context):
    flags = ctx.fragments.cpp.copts + ctx.fragments.cpp.cxxopts
    flags = flags + [ctx.expand_make_variables("copts", option, {}) for option in ctx.rule.attr.copts]
    flags += ["-isystem", ctx.file._source_location.dirname]
    flags += ["-D" + d for d in context.defines.to_list() + context.local_defines.to_list()]
    for option, paths in [
        ("-iquote", context.quote_includes),
        ("-I", context.includes),
        ("-isystem", context.system_includes),
    ]:
        for path in paths.to_list():
            flags += [option, path]

    # Warnings that only g++ knows are not clang's business.
    return flags + ["-Wno-unknown-warning-option"]

def _impl(target, ctx):
    if ctx.label.workspace_name or CcInfo not in target or not hasattr(ctx.rule.attr, "srcs"):
        return []
    context = target[CcInfo].compilation_context
    only = ctx.attr._only[StringListInfo].values
    stamps = []
    for source in ctx.rule.files.srcs:
        if source.extension not in ["cpp", "cc"] or (only and source.path not in only):
            continue
        stamp = ctx.actions.declare_file("{}.{}.tidy".format(ctx.label.name, source.basename))
        ctx.actions.run_shell(
            command = _SCRIPT,
            arguments = [stamp.path, "--config-file=" + ctx.file._config.path, source.path, "--"] + _flags(ctx, context),
            inputs = depset([source, ctx.file._config, ctx.file._source_location] + ctx.rule.files.srcs, transitive = [context.headers]),
            outputs = [stamp],
            mnemonic = "ClangTidy",
            progress_message = "clang-tidy " + source.short_path,
        )
        stamps.append(stamp)
    return [OutputGroupInfo(tidy = depset(stamps))]

clang_tidy_aspect = aspect(
    implementation = _impl,
    attrs = {
        "_config": attr.label(default = "//:.clang-tidy", allow_single_file = True),
        "_only": attr.label(default = "//tools:tidy_only"),
        "_source_location": attr.label(default = "//tools:clang_tidy/source_location", allow_single_file = True),
    },
    fragments = ["cpp"],
)
