"""Puts sources together: batch_sources.py OUTPUT... -- SOURCE...

Each output has a run of the sources, whole, in the order given; runs are of about the same number of lines. #line
directives keep places in messages, __FILE__ and debug information as they are in the sources.
"""

import sys


def lines_of(source):
    """Rounded up, so that a change of a few lines moves no source to another batch."""
    with open(source, encoding="utf-8") as file:
        return -(-sum(1 for _ in file) // 50)


def split(sources, count):
    """`count` runs of the sources, none of them empty."""
    sizes = [lines_of(source) for source in sources]
    total = sum(sizes)
    runs = [[] for _ in range(count)]
    run, before = 0, 0
    for index, (source, size) in enumerate(zip(sources, sizes)):
        left = len(sources) - index
        middle = before + size / 2
        is_full = runs[run] and middle * count > total * (run + 1)
        if run + 1 < count and runs[run] and (is_full or left <= count - 1 - run):
            run += 1
        runs[run].append(source)
        before += size
    return runs


def main(arguments):
    border = arguments.index("--")
    outputs, sources = arguments[:border], arguments[border + 1 :]
    for output, run in zip(outputs, split(sources, len(outputs))):
        with open(output, "w", encoding="utf-8") as batch:
            for source in run:
                with open(source, encoding="utf-8") as file:
                    batch.write(f'#line 1 "{source}"\n{file.read()}\n')


if __name__ == "__main__":
    main(sys.argv[1:])
