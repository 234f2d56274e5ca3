#!/usr/bin/env python3
"""Checks a folder of MetricsLog: check_metrics.py FOLDER FIRST_STEP LAST_STEP NAME...

Reads the event files with a reader of its own (checksums bit by bit), and compares them with metrics.jsonl and
metrics.prom. Each file must have the named metrics, at these steps at the ends.
"""

import json
import math
import pathlib
import re
import struct
import sys


def crc32c(data):
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


def check_crc(data, masked):
    crc = crc32c(data)
    assert ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF == masked, "a checksum"


def records(data):
    while data:
        (size,) = struct.unpack_from("<Q", data)
        check_crc(data[:8], struct.unpack_from("<I", data, 8)[0])
        record = data[12 : 12 + size]
        check_crc(record, struct.unpack_from("<I", data, 12 + size)[0])
        yield record
        data = data[16 + size :]


def fields(message):
    """(number, value) of a protocol buffer."""
    place = 0

    def varint():
        nonlocal place
        value = shift = 0
        while True:
            byte = message[place]
            place += 1
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return value

    while place < len(message):
        tag = varint()
        kind = tag & 7
        if kind == 0:
            value = varint()
        else:
            size = {1: 8, 5: 4}.get(kind) or varint()
            value = message[place : place + size]
            assert len(value) == size, "a field ends early"
            place += size
            value = struct.unpack("<d" if kind == 1 else "<f", value)[0] if kind != 2 else value
        yield tag >> 3, value


def read_events(path):
    """{step: {name: value}}; of a histogram: (sum, limits, counts)."""
    steps = {}
    for i, record in enumerate(records(path.read_bytes())):
        event = dict(fields(record))
        assert event[1] > 1.7e9, "a wall time"
        if i == 0:
            assert event[3] == b"brain.Event:2", event
            continue
        values = {}
        for number, value in fields(event[5]):
            assert number == 1
            value = dict(fields(value))
            if 5 in value:
                histogram = dict(fields(value[5]))
                limits, counts = ([x for (x,) in struct.iter_unpack("<d", histogram[field])] for field in (6, 7))
                assert histogram[3] == sum(counts)
                values[value[1].decode()] = (histogram[4], limits, counts)
            else:
                values[value[1].decode()] = value[2]
        steps[event[2]] = values
    return steps


def is_same(event, line):
    if isinstance(event, tuple):
        return event == (line["sum"], line["bounds"] + [sys.float_info.max], line["counts"])
    return math.isnan(event) if line is None else math.isclose(event, line, rel_tol=1e-6)


def check_prometheus(text, last):
    """`last`: the last line of metrics.jsonl."""
    samples = {}
    for line in text.splitlines():
        if not line.startswith("# TYPE "):
            match = re.fullmatch(r'([a-z_][a-zA-Z0-9_]*)(\{le="[^"]+"\})? (\S+)', line)
            assert match, line
            samples[match[1] + (match[2] or "")] = float(match[3])
    for name, value in last.items():
        if name in ("step", "time"):
            continue
        flat = "tessera_" + name.replace("/", "_")
        if isinstance(value, dict):
            assert samples[flat + '_bucket{le="+Inf"}'] == samples[flat + "_count"] == sum(value["counts"])
            assert samples[flat + "_sum"] == value["sum"]
        else:
            sample = samples.get(flat, samples.get(flat + "_total"))
            assert math.isnan(sample) if value is None else sample == value, (name, sample, value)


def main(folder, first, last, *names):
    folder = pathlib.Path(folder)
    lines = {line["step"]: line for line in map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())}
    events = {}
    for path in sorted(folder.glob("events.out.tfevents.*")):
        events.update(read_events(path))
    assert sorted(lines) == sorted(events), (sorted(lines), sorted(events))
    assert (min(lines), max(lines)) == (int(first), int(last)), sorted(lines)
    for step, line in lines.items():
        assert set(line) - {"step", "time"} == set(events[step]), (line, events[step])
        for name, value in events[step].items():
            assert is_same(value, line[name]), (step, name, value, line[name])
    check_prometheus((folder / "metrics.prom").read_text(), lines[max(lines)])
    for name in names:
        assert name in lines[max(lines)], f"no {name} in {lines[max(lines)]}"
    print(f"{len(lines)} steps, {len(lines[max(lines)]) - 2} metrics")


if __name__ == "__main__":
    main(*sys.argv[1:])
