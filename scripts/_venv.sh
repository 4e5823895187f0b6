# Sourced by quickstart and test: `set_up_venv [EXTRA]` makes and activates a virtual environment at the top of the
# checkout with posttrain installed. All output goes to stderr.
#   PYTHON          interpreter to make it with (default python3; 3.11 or newer)
#   POSTTRAIN_VENV  the environment's folder (default .venv)

fail() {
    echo "error: $1" >&2
    echo "hint: $2" >&2
    exit 2
}

set_up_venv() {
    local extra="${1:-}" root venv python stamp
    root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
    venv="${POSTTRAIN_VENV:-$root/.venv}"
    python="${PYTHON:-python3}"
    if [[ ! -x "$venv/bin/python" ]]; then
        "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null ||
            fail "$python is not Python 3.11 or newer" "set PYTHON to one that is"
        echo "making the virtual environment $venv" >&2
        "$python" -m venv "$venv" >&2
    fi
    # The stamp holds what was installed: a change of either file, or another extra, installs again.
    stamp="$(cat "$root/pyproject.toml" "$root/constraints.txt" | "$venv/bin/python" -c \
        'import hashlib, sys; print(hashlib.sha256(sys.stdin.buffer.read()).hexdigest())')"
    if ! grep -qsx "$stamp $root ${extra:-.*}" "$venv/posttrain-stamp"; then
        echo "installing into $venv (a few minutes the first time)" >&2
        # torch first: it is the large one, and packages that build against it find it there.
        "$venv/bin/python" -m pip install --quiet -c "$root/constraints.txt" "$(grep '^torch==' "$root/constraints.txt")" >&2
        "$venv/bin/python" -m pip install --quiet -c "$root/constraints.txt" -e "$root${extra:+[$extra]}" >&2
        echo "$stamp $root $extra" > "$venv/posttrain-stamp"
    fi
    # shellcheck disable=SC1091
    source "$venv/bin/activate"
}
