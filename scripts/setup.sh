#!/usr/bin/env bash
# Set up moe-plugin in a virtual environment. The second run takes a second unless something changed.
#
#   bash scripts/setup.sh [options]
#
#   --venv DIR      the environment (default: .venv in the repository)
#   --python EXE    interpreter for the environment (default: the first of python3, python3.13 ... python3.10 that is 3.10 or newer)
#   --torch SPEC    requirement for torch (default: torch==2.13.0; a torch that is installed for EXE is used unchanged)
#   --hosts LIST    fairseq,megatron (default), one of them, or none
#   --training      only what training needs, without the packages for the tests and the documentation
#   --fresh         repeat all steps
set -euo pipefail
. "$(dirname -- "${BASH_SOURCE[0]}")/lib.sh"

VENV="$ROOT/.venv" PYTHON="" TORCH="" HOSTS="fairseq,megatron" FRESH=0 NEEDS=everything
FAIRSEQ="fairseq==0.12.2"
MEGATRON="megatron-core==0.19.2"
while [ $# -gt 0 ]; do
    case "$1" in
        --venv) VENV=$2; shift 2 ;;
        --python) PYTHON=$2; shift 2 ;;
        --torch) TORCH=$2; shift 2 ;;
        --hosts) HOSTS=$2; shift 2 ;;
        --training) NEEDS=training; shift ;;
        --fresh) FRESH=1; shift ;;
        -h | --help) usage "$0"; exit 0 ;;
        *) die "unknown option $1; see bash scripts/setup.sh --help" ;;
    esac
done
case "$VENV" in /*) ;; *) VENV="$PWD/$VENV" ;; esac
LOG="$ROOT/runs/setup.log"
mkdir -p "$ROOT/runs"

recent() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; }

find_python() {
    local name
    for name in ${PYTHON:+"$PYTHON"} python3 python3.13 python3.12 python3.11 python3.10; do
        if recent "$name"; then PYTHON=$(command -v "$name"); return; fi
        [ -z "$PYTHON" ] || die "--python $PYTHON is not Python 3.10 or newer. Use another interpreter"
    done
    die "no Python 3.10 or newer found; on Debian or Ubuntu: sudo apt-get install python3 python3-venv python3-dev"
}

has_module() { "$1" -c "import importlib.util as u, sys; sys.exit(u.find_spec('$2') is None)" 2>/dev/null; }

make_venv() {
    [ -x "$VENV/bin/python" ] && return
    local site=()
    # a container's own torch was built for its GPUs, so it is used instead of another one
    if [ -z "$TORCH" ] && has_module "$PYTHON" torch; then site=(--system-site-packages); fi
    step "virtual environment" "$LOG" "$PYTHON" -m venv ${site[@]+"${site[@]}"} "$VENV" ||
        die "cannot make a virtual environment in $VENV; on Debian or Ubuntu: sudo apt-get install python3-venv"
}

# Without --no-compile pip compiles every module of every package, which takes longer than to unpack
# them. Python compiles the modules that are imported.
pip_step() { # LABEL ARGUMENTS...
    local label=$1
    shift
    (cd "$ROOT" && step "$label" "$LOG" "$VENV/bin/python" -m pip install --no-compile "$@") ||
        die "pip could not install this. Check the network and the message above, then run the same command again: it continues where it stopped"
}

# uv installs several packages at a time. It does not see packages outside of the environment.
find_uv() {
    UV=$(command -v uv || true)
    if grep -q '^include-system-site-packages = true' "$VENV/pyvenv.cfg"; then UV=""; return; fi
    [ -n "$UV" ] || if "$VENV/bin/python" -m pip install -q --only-binary :all: uv >>"$LOG" 2>&1; then UV="$VENV/bin/uv"; fi
}

# Print the variables by which uv finds packages where pip finds them: uv does not read pip's settings.
sources_of_pip() {
    local option values
    "$VENV/bin/python" -m pip config list |
        sed -nE "s/^.*\.(index-url|extra-index-url|find-links)='(.*)'$/\1 \2/p" | sort -u |
        while read -r option values; do
            read -r values <<<"${values//\\n/ }"
            case "$option" in
                index-url) echo "UV_INDEX_URL=$values" ;;
                extra-index-url) echo "UV_EXTRA_INDEX_URL=$values" ;;
                find-links) echo "UV_FIND_LINKS=${values// /,}" ;;
            esac
        done
}

# install_most LABEL REQUIREMENTS...: with uv, or with pip if uv is missing or fails. The torch that
# is installed stays.
install_most() {
    local label=$1 torch sources
    shift
    torch=$("$VENV/bin/python" -c "from importlib.metadata import version; print('torch==' + version('torch'))")
    find_uv
    if [ -n "$UV" ]; then
        mapfile -t sources < <(sources_of_pip)
        # a megatron-core that is installed asks for another Python (see install_megatron)
        echo 'megatron-core; python_version < "3.11"' >"$VENV/overrides.txt"
        if (cd "$ROOT" && step "$label" "$LOG" env ${sources[@]+"${sources[@]}"} "$UV" pip install \
            --python "$VENV/bin/python" --index-strategy unsafe-best-match \
            --overrides "$VENV/overrides.txt" "$torch" "$@"); then return; fi
        say "  uv could not install this, so pip does"
    fi
    pip_step "$label" "$torch" "$@"
}

check_compiler() {
    local header
    header=$("$VENV/bin/python" -c 'import sysconfig; print(sysconfig.get_path("include") + "/Python.h")')
    command -v c++ >/dev/null || command -v g++ >/dev/null || command -v clang++ >/dev/null ||
        die "fairseq is built from source and needs a C++ compiler; on Debian or Ubuntu: sudo apt-get install g++ (or leave fairseq out: --hosts megatron)"
    [ -f "$header" ] ||
        die "fairseq is built from source and needs $header; on Debian or Ubuntu: sudo apt-get install python3-dev (or leave fairseq out: --hosts megatron)"
}

install_fairseq() {
    if [ "$FRESH" -eq 0 ] && "$VENV/bin/python" -c "from importlib.metadata import version as v; raise SystemExit('fairseq==' + v('fairseq') != '$FAIRSEQ')" 2>/dev/null; then return; fi
    check_compiler
    # --no-deps: fairseq's metadata pins hydra and omegaconf versions that pip refuses; the extra fairseq contains its dependencies
    pip_step "fairseq (builds from source, about 2 minutes)" --no-deps "$FAIRSEQ"
}

install_megatron() {
    # Wheels from 0.17 on contain Megatron's own training loop. They ask for Python 3.12, but also work on 3.11. With an older
    # Python, the extra installs the newest version for it, without this loop. --no-deps: the extra contains the dependencies
    "$VENV/bin/python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || return 0
    if [ "$FRESH" -eq 0 ] && "$VENV/bin/python" -c "from importlib.metadata import version as v; raise SystemExit('megatron-core==' + v('megatron-core') != '$MEGATRON')" 2>/dev/null; then return; fi
    pip_step "$MEGATRON" --no-deps --ignore-requires-python "$MEGATRON"
}

install_vision() {
    # --no-deps: pip would install the newest torchvision, and with it another torch
    local matching folder="$VENV/torchvision"
    has_module "$VENV/bin/python" timm || pip_step "timm" --no-deps "timm>=1.0,<2"
    if has_module "$VENV/bin/python" torchvision || [ -d "$folder" ]; then return; fi
    matching=$("$VENV/bin/python" -c "from importlib.metadata import version as v; t = v('torch').split('.'); print(f'torchvision==0.{int(t[1]) + 15}.*')")
    # In a separate folder, because a torch for CPUs cannot load the operators of a build for CUDA,
    # and then every import of it (for example by transformers) fails. Vision does not need them
    local wheels="$VENV/wheels"
    if ! "$VENV/bin/python" -m pip download -q --no-deps -d "$wheels" "$matching" >>"$LOG" 2>&1; then
        say "  no $matching for this torch: moe_plugin.hosts.timm cannot run, and its tests are skipped"
        return
    fi
    pip_step "$matching" --no-deps --target "$folder" "$wheels"/torchvision-*.whl
    if "$VENV/bin/python" -c "import sys; sys.path.append('$folder'); import torchvision" 2>/dev/null; then
        rm -rf "$folder"
        pip_step "$matching" --no-deps "$wheels"/torchvision-*.whl
    fi
    rm -rf "$wheels"
}

stamp() { # NEEDS
    # the compat module is copied into the environment, so a change of this module also needs an installation
    { cat "$ROOT/pyproject.toml" "$ROOT/scripts/setup.sh" "$ROOT"/moe_plugin/hosts/fairseq/compat/startup.*; printf '%s\n' "$ROOT" "$TORCH" "$HOSTS" "$1"; "$VENV/bin/python" -VV; } | cksum
}

STAMP="$VENV/.moe-plugin-setup"
if [ "$FRESH" -eq 0 ] && [ -f "$STAMP" ]; then
    # an environment with everything also has what training needs
    for needs in everything "$NEEDS"; do
        if [ "$(stamp "$needs" 2>/dev/null)" = "$(cat "$STAMP")" ]; then
            say "environment $VENV is up to date (--fresh sets it up again)"
            exit 0
        fi
    done
fi
find_python
: >"$LOG"
say "setting up $VENV with $("$PYTHON" -V); log: $LOG"
make_venv
rm -f "$STAMP"
pip_step "pip" --upgrade pip
if [ -n "$TORCH" ] || ! has_module "$VENV/bin/python" torch; then pip_step "torch (${TORCH:-torch==2.13.0})" "${TORCH:-torch==2.13.0}"; fi
EXTRAS=dev
[ "$NEEDS" = everything ] || EXTRAS=fairseq
case ",$HOSTS," in *,megatron,*)
    EXTRAS="$EXTRAS,megatron"
    install_megatron ;;
esac
install_most "moe-plugin with its extras ($EXTRAS)" -e ".[$EXTRAS]"
[ "$NEEDS" = training ] || install_vision
case ",$HOSTS," in *,fairseq,*) install_fairseq ;; esac
stamp "$NEEDS" >"$STAMP"
say "done. Activate it with: . '$VENV/bin/activate'; then look around with: moe-plugin doctor"
