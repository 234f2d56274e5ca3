#!/usr/bin/env bash
# A disk of 1 MiB, which only this process sees, for the test of a disk that is full.
set -euo pipefail
program=$1
if ! unshare --user --map-root-user --mount true; then
  echo "skipped: this machine gives no mount namespace"
  exit 0
fi
export TESSERA_SMALL_DISK=$TEST_TMPDIR/disk OMP_NUM_THREADS=1
mkdir "$TESSERA_SMALL_DISK"
unshare --user --map-root-user --mount bash -c \
  'mount -t tmpfs -o size=1m tmpfs "$TESSERA_SMALL_DISK" && exec "$0" "[.full_disk]"' "$program"
