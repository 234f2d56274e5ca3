"""Sources of one target, put together so that g++ compiles several of them at once.

With libtorch's headers precompiled, a source costs some seconds before its first line: at the end of every translation
unit g++ instantiates what those headers name. Sources that share a translation unit pay that once. A source must still
compile alone: names in anonymous namespaces differ within a target, and each source includes what it uses, which
`--config=tidy` checks one by one. `--define=tessera_batches=off` compiles one by one.
"""

# A change to a source compiles its batch again, so that batches are no larger than needed. Those of tests are larger: most
# of what a test's source costs is what libtorch's headers and Catch2's instantiate.
SOURCES_PER_BATCH = 12
TEST_SOURCES_PER_BATCH = 24

def _batched_sources_impl(ctx):
    outputs = [
        ctx.actions.declare_file("_batches/{}/batch_{}.cpp".format(ctx.label.name, i))
        for i in range(ctx.attr.count)
    ]
    arguments = ctx.actions.args()
    arguments.add(ctx.file._script)
    arguments.add_all(outputs)
    arguments.add("--")
    arguments.add_all(ctx.files.srcs)
    ctx.actions.run_shell(
        command = "exec python3 \"$@\"",
        arguments = [arguments],
        inputs = ctx.files.srcs + [ctx.file._script],
        outputs = outputs,
        mnemonic = "BatchSources",
        progress_message = "Putting together the sources of " + str(ctx.label),
        use_default_shell_env = True,
    )
    return [DefaultInfo(files = depset(outputs))]

_batched_sources = rule(
    implementation = _batched_sources_impl,
    attrs = {
        "count": attr.int(mandatory = True, doc = "how many files to make"),
        "srcs": attr.label_list(mandatory = True, allow_files = [".cpp"], doc = "what to put together"),
        "_script": attr.label(default = "//tools:batch_sources.py", allow_single_file = True),
    },
)

def batched(name, srcs, testonly, sources_per_batch):
    """The srcs of a cc_* rule: those given, or batches of them and the headers among them.

    Args:
      name: of the target.
      srcs: as in the target; a select() is taken as it is.
      testonly: as in the target.
      sources_per_batch: at most.

    Returns:
      Labels, in a select() where there is a choice.
    """
    if type(srcs) != "list":
        return srcs
    sources = [source for source in srcs if source.endswith(".cpp")]
    if len(sources) < 2:
        return srcs
    _batched_sources(
        name = name + "_batches",
        srcs = sources,
        count = (len(sources) + sources_per_batch - 1) // sources_per_batch,
        testonly = testonly,
        tags = ["manual"],
        visibility = ["//visibility:private"],
    )
    return select({
        "//tools:batches_off": srcs,
        "//conditions:default": [source for source in srcs if not source.endswith(".cpp")] + [":" + name + "_batches"],
    })
