#!/usr/bin/env bash
# install.sh <requirements.txt> <directory> <description>: installs the pinned wheels, of CPython 3.11, into a directory,
# unless it is there.
# Several clones may call this at once: one installs, the others wait. The directory appears complete or not at all.
set -euo pipefail
requirements=$1 site=$2 description=$3 machine=$(uname -m)

[[ -d $site ]] && exit
for python in python3 /usr/bin/python3 ''; do
  [[ -n $python ]] && "$python" -m pip --version >/dev/null 2>&1 && break
done
[[ -n $python ]] || { echo "neither python3 nor /usr/bin/python3 has pip: install python3-pip" >&2; exit 1; }

platforms=(--platform "manylinux2010_$machine" --platform "manylinux2014_$machine")
for glibc in 17 18 25 27 28; do platforms+=(--platform "manylinux_2_${glibc}_$machine"); done

mkdir -p "${site%/*}"
exec 9>"$site.lock"
flock 9
[[ -d $site ]] && exit
rm -rf "$site.partial"
echo "Installing $description into $site"
PIP_ROOT_USER_ACTION=ignore "$python" -m pip install --target "$site.partial" --requirement "$requirements" --require-hashes --no-deps \
  --only-binary=:all: --implementation cp --python-version 3.11 \
  "${platforms[@]}" \
  --no-user --no-cache-dir --no-compile --no-input --disable-pip-version-check --progress-bar off
mv -T "$site.partial" "$site"
