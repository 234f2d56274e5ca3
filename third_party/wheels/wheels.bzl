"""Pinned wheels in a folder of their own, for repository rules."""

def _pinned_versions(requirements):
    return [line.split("==")[1].split(" ")[0] for line in requirements.split("\n") if "==" in line]

def install_wheels(ctx, name, description, requirements = None):
    """Installs pinned wheels, once per machine, into ~/.cache/tessera (XDG_CACHE_HOME is honoured).

    The folder's name has their versions, so that a second clone downloads nothing and a new pin installs anew.

    Args:
      ctx: of a repository rule with the attributes `requirements` and `_install` (install.sh), and the environment's
        HOME and XDG_CACHE_HOME.
      name: begins the folder's name.
      description: of what is installed and its size, for the progress line.
      requirements: label of the file that pins the wheels; None: ctx.attr.requirements.

    Returns:
      struct(site: the folder's path, error: "" or what pip printed).
    """
    requirements = requirements or ctx.attr.requirements
    env = ctx.os.environ
    cache = env.get("XDG_CACHE_HOME", "") or (env["HOME"] + "/.cache" if env.get("HOME", "") else "")
    versions = "-".join(_pinned_versions(ctx.read(requirements)))
    machine = ctx.execute(["uname", "-m"]).stdout.strip()
    folder = name + "-" + versions + ("" if machine == "x86_64" else "-" + machine)
    site = "{}/tessera/{}".format(cache, folder) if cache else str(ctx.path("pinned/" + folder))
    if not ctx.path(site).exists:
        ctx.report_progress("installing " + description)
        command = [ctx.path(ctx.attr._install), ctx.path(requirements), site, description]
        result = ctx.execute(command, timeout = 3600, quiet = False)
        if result.return_code:
            return struct(site = site, error = result.stderr)
    return struct(site = site, error = "")
