"""What results depend on: the machine, the compiler, the libraries, the commit. No names of hosts, no paths."""

import datetime
import os
import platform
import re
import subprocess


def _first_match(pattern, path):
    with open(path, encoding="utf-8") as file:
        match = re.search(pattern, file.read(), re.MULTILINE)
    return match.group(1).strip() if match else "unknown"


def _output(*command):
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def pytorch_version(python):
    """Throws CalledProcessError or OSError where it is no Python that has torch."""
    return _output(python, "-c", "import torch; print(torch.__version__.split('+')[0])")


def commit(workspace):
    """Of the sources; "" where git does not know."""
    try:
        revision = _output("git", "-C", workspace, "rev-parse", "--short=12", "HEAD")
        changes = _output("git", "-C", workspace, "status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.CalledProcessError):
        return ""
    return revision + (" with local changes" if changes else "")


def describe(program, workspace):
    """`program` is any of the benchmarks."""
    compiler, libtorch = _output(program, "--version").splitlines()
    kib = int(_first_match(r"^MemTotal:\s+(\d+)", "/proc/meminfo"))
    kernel = re.match(r"[\d.]*\d", platform.release())
    return {
        "cpu": _first_match(r"^model name\s*:(.*)$", "/proc/cpuinfo"),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(kib / (1 << 20), 1),
        "kernel": f"Linux {kernel.group(0) if kernel else 'unknown'}",
        "compiler": compiler,
        "libtorch": libtorch.removeprefix("libtorch "),
        "commit": commit(workspace),
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
    }


def busy_seconds():
    """CPU time that all programs of the machine have used."""
    with open("/proc/stat", encoding="utf-8") as file:
        user, nice, system, _, _, irq, softirq, steal = map(int, file.readline().split()[1:9])
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")
