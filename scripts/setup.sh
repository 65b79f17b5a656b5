#!/usr/bin/env bash
# Makes .venv from requirements.lock, once: a stamp named after the lock's hash says that nothing is left to do. A second
# one, after pyproject.toml's, covers the project's own entry points. `setup.sh test` adds what only the tests need.
# `setup.sh test` also installs the browser that the tests open the report in.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${PYTHON:-python3}
venv=.venv
stamp=$venv/.installed-$(sha256sum <requirements.lock | cut -c1-16)
own_stamp=$venv/.project-$(sha256sum <pyproject.toml | cut -c1-16)
torch_index=https://download.pytorch.org/whl/cpu   # only asked when pip's configured sources lack the CPU build

fail() { printf 'setup: %s\n' "$*" >&2; exit 1; }
apt_install() { # $1 = package, $2 = why
  if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    { apt-get install -y -qq --no-install-recommends "$1" || { apt-get update -qq && apt-get install -y -qq --no-install-recommends "$1"; }; } >/dev/null 2>&1 \
      || fail "could not install $1 ($2): run 'apt-get update && apt-get install $1' and look at its error"
  else
    fail "$1 is missing ($2): run 'sudo apt-get install $1' (or your distribution's equivalent), then this again"
  fi
}

[ "$(uname -sm)" = "Linux x86_64" ] || fail "the locked environment is for Linux on x86-64, this is $(uname -sm)"
PATH=$PATH:/sbin ldconfig -p | grep libibverbs.so.1 >/dev/null || apt_install libibverbs1 "Mooncake links to it"
if [ "${1:-}" = test ] && ! command -v chromium >/dev/null && ! command -v google-chrome >/dev/null; then
  apt_install chromium "the tests open the report in a real browser"
fi
[ -e "$stamp" ] && [ -e "$own_stamp" ] && exit 0

pip=("$venv/bin/python" -m pip --disable-pip-version-check install -q --no-deps)
if ! [ -e "$stamp" ]; then
  command -v "$python" >/dev/null || fail "no $python: install Python 3.11 to 3.13, or name one with PYTHON=..."
  "$python" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' \
    || fail "$python is $("$python" -V 2>&1): Python 3.11 to 3.13 is needed, name one with PYTHON=..."
  "$python" -c 'import ensurepip, venv' 2>/dev/null || apt_install python3-venv "it makes virtual environments"
  echo "setup: making $venv with $("$python" -V) (about 2 minutes, 4 GB)"
  rm -rf "$venv"
  "$python" -m venv "$venv"
  "${pip[@]}" -r requirements.lock 2>"$venv/pip.log" \
    || "${pip[@]}" --extra-index-url "$torch_index" -r requirements.lock 2>>"$venv/pip.log" \
    || { cat "$venv/pip.log" >&2; fail "pip could not install requirements.lock (its messages are above)"; }
  touch "$stamp"
fi
"${pip[@]}" --no-build-isolation -e . || fail "pip could not install this project itself"
touch "$own_stamp"
echo "setup: done"
