# Sourced by the scripts in bin/: creates the environment in .venv and installs rlscale from this checkout.
#
# Environment variables:
#   PYTHON           interpreter of the new environment; default: the first supported one of python3, python3.13, ...
#   TORCH_INDEX_URL  package index of torch, e.g. PyTorch's index of CPU wheels, which have a fifth of the size;
#                    default: the index of pip's configuration. To change it later, remove .venv first.

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)"
VENV="$ROOT/.venv"
CONSTRAINTS="$ROOT/constraints.txt"

say() { printf '\033[1m==>\033[0m %s\n' "$*" >&2; }

fail() {
  printf 'error: %s\n' "$*" >&2
  exit 1
}

# Prints the first interpreter that requires-python of pyproject.toml allows.
find_python() {
  local candidate
  for candidate in ${PYTHON:-python3 python3.13 python3.12 python3.11}; do
    if "$candidate" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' 2>/dev/null; then
      command -v "$candidate"
      return
    fi
  done
  fail "rlscale must have Python 3.11, 3.12 or 3.13, got ${PYTHON:+PYTHON=$PYTHON, that is }$(
    "${PYTHON:-python3}" --version 2>&1 || true
  ); install one of them or set PYTHON to its path"
}

make_venv() {
  local python
  if [[ -x "$VENV/bin/python" ]] && "$VENV/bin/python" -m pip --version >/dev/null 2>&1; then return; fi
  python="$(find_python)"
  say "Creating the environment ${VENV#"$ROOT/"} with $("$python" --version)"
  "$python" -m venv --clear "$VENV" >&2 ||
    fail "'$python -m venv' must work; on Debian and Ubuntu install the package python3-venv"
}

# Hash of everything an installation depends on. Scripts of the environment contain the path of the checkout.
fingerprint() {
  { echo "$ROOT ${TORCH_INDEX_URL:-}"; cat "$ROOT/pyproject.toml" "$CONSTRAINTS"; "$VENV/bin/python" --version; } |
    "$VENV/bin/python" -c 'import hashlib, sys; print(hashlib.sha256(sys.stdin.buffer.read()).hexdigest())'
}

pip_install() {
  "$VENV/bin/python" -m pip install --quiet --disable-pip-version-check "$@" >&2 ||
    fail "pip could not install ($*); its message is above"
}

# torch first, in a separate call, because only torch may come from a different index.
install_torch() {
  local torch installed index=()
  torch="$(grep -E '^torch==' "$CONSTRAINTS")"
  # Read completely first: a grep that stops at its match would end pip with the traceback of a broken pipe.
  installed="$("$VENV/bin/python" -m pip freeze)"
  if grep -qE "^$torch(\+|$)" <<<"$installed"; then return; fi
  [[ -z "${TORCH_INDEX_URL:-}" ]] || index=(--index-url "$TORCH_INDEX_URL")
  say "Installing $torch from ${TORCH_INDEX_URL:-the index of the pip configuration} (the largest download)"
  if [[ -z "${TORCH_INDEX_URL:-}" && "$(uname -s)" == Linux ]] && ! command -v nvidia-smi >/dev/null; then
    say "  no GPU found: set TORCH_INDEX_URL to the index of PyTorch's CPU wheels for a smaller build"
  fi
  pip_install ${index[@]+"${index[@]}"} "$torch"
}

# install_rlscale [extra]: installs if the last installation differs. The `dev` extra includes the plain installation.
install_rlscale() {
  local extra="${1:-}" wanted started=$SECONDS stamp="$VENV/.rlscale-installed"
  make_venv
  wanted="$(fingerprint)"
  if [[ -f "$stamp" ]] && grep -qxE "$wanted (${extra:-|dev})" "$stamp"; then return; fi
  install_torch
  say "Installing rlscale${extra:+ with the packages of its tests} from this checkout"
  pip_install --constraint "$CONSTRAINTS" --editable "$ROOT${extra:+[$extra]}"
  echo "$wanted $extra" >"$stamp"
  say "Installed in $((SECONDS - started)) s"
}
