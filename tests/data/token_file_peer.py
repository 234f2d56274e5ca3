"""Megatron-LM's token files, byte by byte as its indexed_dataset.py describes them, for token_file_test.cpp.

token_file_peer.py write <folder>: writes <name>.idx and <name>.bin of several dtypes, and documents.json: by name, the
ids of each document. token_file_peer.py check <prefix> <documents.json>: fails unless that file has these documents.
"""

import json
import pathlib
import random
import struct
import sys

import numpy

MAGIC = b"MMIDIDX\x00\x00"
DTYPES = {1: numpy.uint8, 4: numpy.int32, 5: numpy.int64, 8: numpy.uint16}


def write(prefix, code, documents):
    """`documents`: each a list of sequences, each a list of ids"""
    sequences = [numpy.array(sequence, dtype=DTYPES[code]) for document in documents for sequence in document]
    with open(f"{prefix}.bin", "wb") as file:
        for sequence in sequences:
            file.write(sequence.tobytes(order="C"))
    places, bounds = [], [0]
    for sequence in sequences:
        places.append(places[-1] + before if places else 0)
        before = sequence.nbytes
    for document in documents:
        bounds.append(bounds[-1] + len(document))
    with open(f"{prefix}.idx", "wb") as file:
        file.write(MAGIC + struct.pack("<Q", 1) + struct.pack("<B", code))
        file.write(struct.pack("<Q", len(sequences)) + struct.pack("<Q", len(bounds)))
        file.write(struct.pack(f"<{len(sequences)}i", *map(len, sequences)))
        file.write(struct.pack(f"<{len(places)}q", *places))
        file.write(struct.pack(f"<{len(bounds)}q", *bounds))


def read(prefix):
    """The ids of each document."""
    data = pathlib.Path(f"{prefix}.idx").read_bytes()
    assert data[:9] == MAGIC
    version, code, number, bounds_number = struct.unpack_from("<QBQQ", data, 9)
    assert version == 1
    lengths = numpy.frombuffer(data, dtype=numpy.int32, count=number, offset=34)
    places = numpy.frombuffer(data, dtype=numpy.int64, count=number, offset=34 + 4 * number)
    bounds = numpy.frombuffer(data, dtype=numpy.int64, count=bounds_number, offset=34 + 12 * number)
    assert len(data) == 34 + 12 * number + 8 * bounds_number
    bin_data = pathlib.Path(f"{prefix}.bin").read_bytes()

    def sequence(i):
        return numpy.frombuffer(bin_data, dtype=DTYPES[code], count=lengths[i], offset=places[i]).tolist()

    return [sum(map(sequence, range(begin, end)), []) for begin, end in zip(bounds, bounds[1:])]


def write_all(folder):
    draws = random.Random(3)
    documents = {}
    for name, code, largest in ("bytes", 1, 255), ("ints", 4, 2**31 - 1), ("longs", 5, 2**40), ("shorts", 8, 65535):
        drawn = [
            [[draws.randint(0, largest) for _ in range(draws.randint(0, 9))] for _ in range(draws.randint(1, 3))]
            for _ in range(50)
        ]
        write(folder / name, code, drawn)
        documents[name] = [sum(document, []) for document in drawn if sum(document, [])]
        assert [document for document in read(folder / name) if document] == documents[name]
    (folder / "documents.json").write_text(json.dumps(documents))
    numpy.array([7, 70000, 5, 9], dtype=numpy.uint32).tofile(folder / "raw.bin")


def main(command, *arguments):
    if command == "write":
        write_all(pathlib.Path(arguments[0]))
    else:
        prefix, expected = arguments
        assert read(prefix) == json.loads(pathlib.Path(expected).read_text())


if __name__ == "__main__":
    main(*sys.argv[1:])
