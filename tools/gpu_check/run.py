"""Runs the programs of a gpu_check folder on this machine, and writes one JSON report.

  python3 run.py --libtorch /path/to/torch [--out report.json] [--timeout 600] [--budget SECONDS] [--only NAME...]

--libtorch is the torch/ folder of a pip install or an unpacked libtorch zip, of the version that the programs were built
with; by default that of this Python's torch. The report tells the GPUs, each program's tests that passed, failed and
were skipped, the latter with the reason, and what the benchmark measured. Without a GPU everything that needs one is
"skipped"; nothing is measured. A test that runs on every device has run on the CPU then; with a GPU, tests of ops run
there alone. The report is written after each program, so that one which takes the machine with it leaves what came
before; all that a failed program printed is in a file beside it, report.NAME.txt. What is left when --budget is used up is not
run, and the report says so. Exits with 1 if a test failed, a program could not run or libtorch is of another version.
"""

import argparse
import contextlib
import ctypes
import gzip
import importlib.util
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree

HERE = pathlib.Path(__file__).resolve().parent
VERSION_HEADER = "include/torch/headeronly/version.h"
# Of the families of ops (tests/dtensor/ops_*_test.cpp), all that have a rule on CUDA.
FAMILIES = """attention batch_norm complex composite image in_place indexing list loss matmul norm pointwise random
    reduction view write""".split()
# Whole programs, and files of programs, which Catch2 knows by the tag [#file] with the option -#.
PROGRAMS = """cuda_test gloo_backend_test comm_device_test parallel_device_test checkpoint_device_test
    fsdp_offload_test""".split()
FILES = {
    "fully_shard_device_test": "block_copy_test device_parity_test device_features_test float8_all_gather_test".split(),
    "parallel_test": ["expert_parallel_test"],
    "ops_test": [f"ops_{family}_test" for family in FAMILIES],
}
# Name in the report → program and its arguments.
TESTS = {name: [name] for name in PROGRAMS}
TESTS |= {file: [program, "-#", f"[#{file}]"] for program, files in FILES.items() for file in files}
# Those of its files that also run on a GPU.
TESTS |= {
    "dtensor_test": ["dtensor_test", "-#", "[#dtensor_test],[#redistribute_test]"],
    "clip_grad_norm_test": ["dtensor_test", "-#", "[#clip_grad_norm_test],[#shard_norms_test]"],
}
BENCHMARKS = {
    "gpu_kernels": ["gpu_kernels", "--json"],
    "gpu_step": ["gpu_step", "--json"],
    "gpu_step_of_one": ["gpu_step", "--json", "--ranks", "1"],
    "gpu_step_nccl": ["gpu_step", "--json", "--backend", "nccl"],
    "peer_step": ["gpu_step_peer.py"],
    "peer_step_of_one": ["gpu_step_peer.py", "--ranks", "1"],
    "peer_large": ["train_large_peer.py"],
    "peer_large_batch_16": ["train_large_peer.py", "--batch", "16"],
    "peer_large_64k": ["train_large_peer.py", "--accumulate", "8", "--rounds", "3"],
}
# What only a GPU can tell, by the exit status: kernels under compute-sanitizer, where the machine has it, training beside
# a plain model, and the op corpus, where the folder has one.
# Of all kernels ours alone, by their namespace in mangled names: ATen's are the most by far. And no errors of CUDA's API,
# some of which ATen expects.
SANITIZER = "compute-sanitizer --error-exitcode 99 --report-api-errors no".split()
SANITIZER += ["--kernel-name", "kernel_substring=N7tessera"]
SANITIZED = ["cuda_test", "~a shard of a tensor that 32 bits cannot address"]  # of 3 GiB, which would take hours
# 1.2 billion parameters in bfloat16: 32 GB of a GPU's memory.
LARGE = ["train_gpt", "--device", "cuda", "--nproc", "1", "--dim", "2048", "--layers", "24", "--heads", "16"]
LARGE += ["--context", "1024", "--bf16", "--meta-init", "--peak-tflops", "989", "--sample-bytes", "0"]
LARGE += ["--data", str(HERE / "text.txt"), "--svg", os.devnull]
TRACE = pathlib.Path(tempfile.gettempdir()) / "gpu_check_trace"
COMMANDS = {
    "train_gpt": ["train_gpt", "--device", "cuda", "--nproc", "1", "--check-parity", "--steps", "20"]
    + ["--data", str(HERE / "text.txt"), "--svg", os.devnull],
    "train_over_nccl": ["train_gpt", "--device", "cuda", "--nproc", "2", "--check-parity", "--steps", "10"]
    + ["--data", str(HERE / "text.txt"), "--svg", os.devnull],
    # By tokens a step: 8k, 16k, 64k, 524k.
    "train_large": [*LARGE, "--batch", "8", "--steps", "10", "--eval-samples", "8"],
    "train_large_batch_16": [*LARGE, "--batch", "16", "--steps", "10", "--eval-samples", "16"],
    "train_large_64k": [*LARGE, "--batch", "64", "--accumulate", "8", "--steps", "6", "--eval-samples", "64"],
    "train_large_524k": [*LARGE, "--batch", "512", "--accumulate", "64", "--steps", "3", "--eval-samples", "512"],
    "train_large_captured": [*LARGE, "--batch", "8", "--steps", "10", "--eval-samples", "8", "--captured"],
    "train_captured": ["train_gpt", "--device", "cuda", "--nproc", "1", "--dim", "512", "--layers", "8", "--bf16"]
    + ["--steps", "60", "--captured", "--data", str(HERE / "text.txt"), "--svg", os.devnull],
    "train_uncaptured": ["train_gpt", "--device", "cuda", "--nproc", "1", "--dim", "512", "--layers", "8", "--bf16"]
    + ["--steps", "60", "--data", str(HERE / "text.txt"), "--svg", os.devnull],
    # Where the time of a step goes, by kind of kernel.
    "train_large_breakdown": [*LARGE, "--batch", "8", "--steps", "8", "--eval-samples", "8"]
    + ["--trace", str(TRACE), "--trace-steps", "6-7"],
    "opdb_replay": ["opdb_replay", str(HERE / "corpus.pt"), "--cuda", "--mesh", "2"],
    "memcheck": SANITIZED,
    "racecheck": SANITIZED,
}
PREFIXES = {"memcheck": SANITIZER, "racecheck": [*SANITIZER, "--tool", "racecheck"]}
# Each tensor's memory from CUDA itself: in the caching allocator's large blocks an access past its end would be legal.
VARIABLES = {"memcheck": {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}}
SHARES = {"TESSERA_SHARE_GPUS": "1"}  # with train_over_nccl, where there is one GPU alone
LARGE_MIB = 36000  # what train_large and its peer need; batches of 16 need more


def default_libtorch():
    spec = importlib.util.find_spec("torch")
    return pathlib.Path(spec.origin).parent if spec and spec.origin else None


def version_of(header):
    """ "2.15.0" of libtorch's version.h; None where there is none."""
    found = re.search(r'define TORCH_VERSION[\s\\]*"(.*)"', header.read_text()) if header.exists() else None
    return found[1] if found else None


def environment(libtorch):
    """Where libraries are looked for: libtorch, CUDA's packages beside it, the toolkit, and last the stand-ins."""
    folders = [libtorch / "lib", *sorted(libtorch.parent.glob("nvidia/*/lib"))]
    folders += [pathlib.Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")) / "lib64", HERE / "stand_ins"]
    given = os.environ.get("LD_LIBRARY_PATH")
    path = [str(f) for f in folders[:-1] if f.is_dir()] + ([given] if given else []) + [str(folders[-1])]
    own = {"LD_LIBRARY_PATH": ":".join(path), "OMP_NUM_THREADS": "1", "TESSERA_TEST_OPS_ON_GPU_ALONE": "1"}
    return {**os.environ, **own}


def unpack(name, folder):
    """The program's path, in `folder`."""
    program = pathlib.Path(folder) / name
    program.write_bytes(gzip.decompress((HERE / "bin" / f"{name}.gz").read_bytes()))
    program.chmod(0o755)
    return program


def prefer_library_path(program):
    """Makes an ELF program look where LD_LIBRARY_PATH says, before the folders of the machine that built it.

    DT_RPATH, which comes first, becomes DT_RUNPATH, which comes after.
    """
    data = bytearray(program.read_bytes())
    assert data[:6] == b"\x7fELF\x02\x01", f"{program} is no 64-bit little-endian ELF program"
    number = lambda at, size: int.from_bytes(data[at : at + size], "little")
    headers, size, count = number(32, 8), number(54, 2), number(56, 2)
    for at in range(headers, headers + size * count, size):
        if number(at, 4) == 2:  # PT_DYNAMIC
            for entry in range(number(at + 8, 8), number(at + 8, 8) + number(at + 32, 8), 16):
                if number(entry, 8) == 15:  # DT_RPATH
                    data[entry : entry + 8] = (29).to_bytes(8, "little")
    program.write_bytes(data)


PR_SET_PDEATHSIG = 1
LIBC = ctypes.CDLL(None)


def die_with_parent():
    """In a program before it starts: the leader of a process group, killed when this process ends in whatever way."""
    os.setpgrp()
    LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


# Seconds that a program gets after a time-out to write its report: Catch2 does so when it is told to end.
LAST_WORDS = 5


def run(command, env, timeout, errors=subprocess.STDOUT):
    """(exit status or None after a time-out, output)"""
    process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=errors, preexec_fn=die_with_parent)
    try:
        output, _ = process.communicate(timeout=timeout)
        return process.returncode, output.decode(errors="replace")
    except subprocess.TimeoutExpired:
        process.terminate()
    try:
        process.wait(timeout=LAST_WORDS)
    except subprocess.TimeoutExpired:
        pass
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # ranks too, which are processes of its own
    try:
        output, _ = process.communicate(timeout=60)
    except subprocess.TimeoutExpired as expired:  # one does not end, and has the output open
        output = expired.stdout or b""
    return None, output.decode(errors="replace")


def short(text, limit=1000):
    """The start of an error's text, without the frames that libtorch puts after it."""
    return re.split(r"Exception raised from|\bframe #\d", text, maxsplit=1)[0].strip()[:limit]


def end_of(text, name, out):
    """The last of what a program printed; all of it goes into a file beside the report."""
    out.with_suffix(f".{name}.txt").write_text(text)
    return text[-4000:]


def devices():
    """What nvidia-smi lists; [] where there is none."""
    query = "name,uuid,driver_version,memory.total"
    try:
        status, text = run(["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"], dict(os.environ), 60)
    except FileNotFoundError:
        return []
    rows = [line.split(", ") for line in text.splitlines() if line.count(", ") == 3]
    return [dict(zip(query.split(","), row)) for row in rows] if status == 0 else []


def test_names(command, env):
    """Of all test cases; Catch2 2 and 3 have their own ways to list them."""
    for options in [["--list-test-names-only"], ["--list-tests", "--verbosity", "quiet"]]:
        _, listed = run([*command, *options], env, timeout=120, errors=subprocess.DEVNULL)
        names = {line.strip() for line in listed.splitlines() if line.strip()}
        if names and not any("Run with -?" in name for name in names):
            return names
    return set()


def run_test(command, env, timeout):
    report = pathlib.Path(command[0] + ".xml")
    report.unlink(missing_ok=True)
    status, text = run([*command, "--reporter", "junit", "--out", str(report)], env, timeout)
    try:
        suites = xml.etree.ElementTree.parse(report).getroot()
    except (FileNotFoundError, xml.etree.ElementTree.ParseError):
        suites = xml.etree.ElementTree.Element("testsuites")
    # What a test prints is in the report, where Catch2 catches it, or in the output.
    printed = "\n".join([*suites.itertext(), text])
    skipped = dict(re.findall(r"^\s*skipped: (.*?): ((?:no CUDA device|needs ).*)$", printed, re.M))
    failed = {}
    for case in suites.iter("testcase"):
        reasons = [*case.iter("failure"), *case.iter("error")]
        if reasons:
            texts = [f"{reason.get('message', '')} {''.join(reason.itertext())}" for reason in reasons]
            failed.setdefault(case.get("name"), short("\n".join(texts)))
    # Cases whose assertions are in processes of their own are not in the report, nor are those that a crash kept from
    # running. Sections are, as "case/section".
    ended = status is not None and status >= 0
    passed = {case.get("name").split("/")[0] for case in suites.iter("testcase")}
    if ended and len(suites):
        passed = test_names(command, env)
    passed = {name for name in passed if not any(f"{case}/".startswith(f"{name}/") for case in failed)}
    result = {
        "exit_status": status,
        "passed": sorted(passed - skipped.keys()),
        "failed": sorted(failed),
        "reasons": failed,
        "skipped": [{"test": test, "reason": reason} for test, reason in sorted(skipped.items())],
    }
    if status != 0 or not passed:
        result["output"] = printed
    return result


def run_benchmark(command, env, timeout):
    status, text = run(command, env, timeout)
    result = {"exit_status": status, "measurements": []}
    for name, value in re.findall(r"^(\w+/\w+) ([\d.e+-]+)$", text, re.M):  # of a peer
        result["measurements"].append({"name": name, "value": float(value)})
    for line in text.splitlines():
        if line.startswith("{"):
            try:
                result["measurements"].append(json.loads(line))
            except json.JSONDecodeError:  # of a program that was stopped, or no number
                result.setdefault("unreadable", []).append(line)
    skipped = re.search(r"^skipped: (.*)$", text, re.M)
    if skipped:
        result["skipped"] = skipped[1]
    if status != 0:
        result["output"] = text
    return result


def run_command(command, env, timeout):
    status, text = run(command, env, timeout)
    if status == 0 and "--trace" in command:
        summarize = [sys.executable, str(HERE / "summarize_trace"), str(TRACE / "rank-0.json"), "--steps", "2"]
        status, summary = run(summarize, env, timeout)
        text += summary
    return {"exit_status": status, "output": text}


def visible(found):
    """How many of the GPUs that nvidia-smi lists a program sees."""
    names = os.environ.get("CUDA_VISIBLE_DEVICES")
    return len(found) if names is None else len([name for name in names.split(",") if name])


def why_not(name, found):
    """What a command or a peer lacks on a machine with these GPUs; "": nothing."""
    if not found:
        return "no CUDA device"
    torch = default_libtorch()
    if name.startswith("peer_") and not (torch and (torch / "lib" / "libtorch_cuda.so").exists()):
        return "this Python has no torch for CUDA"
    if "_large" in name and int(found[0].get("memory.total", "0").split()[0]) < LARGE_MIB:
        return f"needs a GPU with {LARGE_MIB} MiB"
    if name in PREFIXES and not shutil.which(PREFIXES[name][0]):
        return f"no {PREFIXES[name][0]} on PATH"
    if name == "opdb_replay" and not (HERE / "corpus.pt").exists():
        return "the folder was built without a corpus (CORPUS, tools/gpu_check/build.sh)"
    return ""


class Limits:
    """Seconds for a program, and for all together (None: no limit) from when this is made."""

    def __init__(self, timeout, budget):
        self.timeout, self.budget = timeout, budget
        self.end = None if budget is None else time.monotonic() + budget

    def of_next(self):
        """Seconds that the next program may take; 0 or less: the budget is used up."""
        return self.timeout if self.end is None else min(self.timeout, self.end - time.monotonic())


def run_program(runner, program, arguments, env, limits, prefix=()):
    """Runs it, unpacked, and says what came of it whatever happens."""
    timeout = limits.of_next()
    if timeout <= 0:
        return {"exit_status": None, "output": f"not run: the budget of {limits.budget:g} s was used up before"}
    try:
        if program.endswith(".py"):
            return runner([sys.executable, str(HERE / "peer" / program), *arguments], dict(os.environ), timeout)
        with tempfile.TemporaryDirectory() as folder:
            unpacked = unpack(program, folder)
            prefer_library_path(unpacked)
            return runner([*prefix, str(unpacked), *arguments], env, timeout)
    except Exception as failure:  # the others are to run all the same
        return {"exit_status": None, "output": f"{type(failure).__name__}: {failure}"}


def sum_up(report):
    tests, others = report["tests"].values(), [*report["benchmarks"].values(), *report["commands"].values()]
    report["totals"] = {key: sum(len(t.get(key, [])) for t in tests) for key in ["passed", "failed", "skipped"]}
    ran = all(result["exit_status"] == 0 and not result.get("unreadable") for result in [*tests, *others])
    totals = report["totals"]
    same = report["built_with_libtorch"] == report["libtorch"]
    report["ok"] = report["complete"] and same and ran and totals["failed"] == 0 and (totals["passed"] > 0 or not tests)


def main():
    names = [*TESTS, *BENCHMARKS, *COMMANDS]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--libtorch", type=pathlib.Path, default=default_libtorch())
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("report.json"))
    parser.add_argument("--timeout", type=float, default=600, help="seconds for one program")
    parser.add_argument("--budget", type=float, help="seconds for all programs together")
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="NAME")
    options = parser.parse_args()
    if options.libtorch is None or not (options.libtorch / "lib" / "libtorch_cuda.so").exists():
        parser.error(f"--libtorch {options.libtorch}: it has no lib/libtorch_cuda.so; give the torch/ folder of a CUDA build")
    found = devices()
    report = {
        "commit": (HERE / "commit").read_text().strip(),
        "built_with_libtorch": version_of(HERE / "libtorch_version.h"),
        "libtorch": version_of(options.libtorch / VERSION_HEADER),
        "peer_torch": version_of(default_libtorch() / VERSION_HEADER) if default_libtorch() else None,
        "gpus": found,
        "gpu": "present" if found else "skipped: no CUDA device (nvidia-smi lists none)",
        "complete": False,
        "tests": {},
        "benchmarks": {},
        "commands": {},
    }

    def write():
        sum_up(report)
        options.out.write_text(json.dumps(report, indent=1) + "\n")

    def keep(results, name, result):
        if "output" in result:
            result["output"] = end_of(result["output"], name, options.out)
        results[name] = result
        write()

    write()
    env = environment(options.libtorch.resolve())
    limits = Limits(options.timeout, options.budget)
    for commands, runner, place in [(TESTS, run_test, "tests"), (BENCHMARKS, run_benchmark, "benchmarks")]:
        for name, (program, *arguments) in commands.items():
            if name in options.only:
                lack = why_not(name, found) if name.startswith("peer_") else ""
                result = (
                    {"exit_status": 0, "measurements": [], "skipped": lack}
                    if lack
                    else run_program(runner, program, arguments, env, limits)
                )
                keep(report[place], name, result)
    for name, (program, *arguments) in COMMANDS.items():
        if name in options.only:
            lack = why_not(name, found)
            own = {**env, **VARIABLES.get(name, {})}
            if name == "train_over_nccl" and visible(found) < 2:
                own |= SHARES
            result = (
                {"exit_status": 0, "skipped": lack}
                if lack
                else run_program(run_command, program, arguments, own, limits, PREFIXES.get(name, ()))
            )
            keep(report["commands"], name, result)
    report["complete"] = True
    write()
    print(json.dumps({key: report[key] for key in ["gpu", "totals", "ok"]}))
    return 0 if report["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
