#!/usr/bin/env bash
# Make (or bring up to date) a virtual environment with the project installed editable.
#
#   scripts/make_venv.sh FOLDER REQUIREMENT...
#
# A Python >= 3.12 is looked for on PATH, then under pyenv's versions, then fetched by uv. Each
# candidate is run before it is believed: pyenv's shims exist for versions that are not active.
set -euo pipefail
folder=$1
shift

suits() {
  "$1" -c 'import sys, ensurepip, venv; sys.exit(sys.version_info < (3, 12))' >/dev/null 2>&1
}

find_python() {
  local name path
  for name in python3.12 python3.13 python3.14 python3 python; do
    path=$(command -v "$name") && suits "$path" && { echo "$path"; return; }
  done
  for path in "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.*/bin/python3; do
    suits "$path" && { echo "$path"; return; }
  done
  return 1
}

python_from_uv() {
  local uv
  if ! uv=$(command -v uv); then
    scratch=$(mktemp -d)
    trap 'rm -rf "$scratch"' EXIT
    python3 -m pip install --quiet --target "$scratch" uv >/dev/null 2>&1 || return 1
    uv=$scratch/bin/uv
  fi
  "$uv" python install --quiet 3.12 && "$uv" venv --quiet --clear --seed --python 3.12 "$folder"
}

if ! suits "$folder/bin/python"; then
  rm -rf "$folder"
  if python=$(find_python); then
    echo "making $folder with $("$python" --version) from $python"
    "$python" -m venv "$folder"
  elif ! python_from_uv; then
    echo "jaxgen needs Python 3.12 or newer and found none on PATH or under pyenv, and uv could" \
      "not fetch one: install Python 3.12 (python.org, pyenv or your system's packages)," \
      "then run make again." >&2
    exit 1
  fi
fi
# Bytecode is written when a module is first imported; compiling all of it here takes a minute.
"$folder/bin/python" -m pip install --quiet --no-compile --disable-pip-version-check "$@"
