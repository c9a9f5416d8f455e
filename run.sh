#!/usr/bin/env bash
# Shardlab's front door: makes the environment (.venv) when it is needed, then runs a command.
# Written for any bash from 3.2 on, which is what macOS has.
[ -n "${BASH_VERSION:-}" ] || exec bash "$0" "$@"      # sh run.sh, where sh is another shell
set -euo pipefail

minimum_python="3.11"
root=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd -P)
venv="$root/.venv"
mpi=mpich
mpi_lock=/dev/null

usage="Usage: ./run.sh COMMAND [--mpi NAME] [OPTIONS]

  demo       train a small GPT on 8 ranks: .venv/bin/shardlab demo; OPTIONS go to mpi_impl.pretrain_gpt, as in
             ./run.sh demo --train-iters 50; the results are in runs/demo
  test       check style, types and the storeys of imports, then run the tests; OPTIONS go to pytest
  test-all   the same with the deep tests, which take long
  test-cuda  the theorems on this machine's GPUs, which ranks share, and timings, in at most eight minutes; the report
             is in runs/test-cuda.txt, or in the file named by CUDA_REPORT; needs CuPy in .venv, as in
             .venv/bin/python -m pip install \".[cuda12,cudnn12]\"; OPTIONS go to pytest. Where the system's Python has
             CuPy and mpi4py, and there is no network, bring wheels of what it lacks, as mpich, and then
                 python3 -m venv --system-site-packages FOLDER
                 FOLDER/bin/python -m pip install --no-index --no-deps *.whl
                 CUDA_PYTHON=FOLDER/bin/python ./run.sh test-cuda      # which uses this Python as it is
  notebook   open the walkthroughs and labs in JupyterLab; OPTIONS go to jupyter lab, as in ./run.sh notebook --no-browser
  labs       make a course of the labs, for students, nbgrader and Gradescope, in the folder named next, else in
             runs/course; --variant SEED draws other tasks than the public ones; course/README.md tells instructors the rest
  docs       build the site, of docs/, the walkthroughs, the labs and the API, in docs/_build/html; it needs no network,
             but for the playground, whose Python npm fetches the first time
  slides     build the slides of the course, HTML and PDF, in the folder named next, else in runs/slides; no network needed
  setup      only make the environment, .venv, which the commands above do when it is missing or out of date; behind it
             stands what for: run (as demo needs it), notebook, course (as labs needs it), test or
             docs, each with all before it; else run
  lock       choose the newest packages that pyproject.toml allows, and pin them in requirements/

  --mpi      which MPI: mpich, which .venv has; openmpi or intel, as packages; system, which mpi4py finds on this machine.
             Each has an environment of its own, as .venv-openmpi: ./run.sh demo --mpi openmpi

The environment is made with the Python named by the variable PYTHON if it is set, else with the first Python $minimum_python
or newer on PATH."

fail() {
    echo "error: $*" >&2
    exit 1
}

# Sets python (its path) and version.
find_python() {
    local candidate found rest seen="" major=${minimum_python%.*} minor=${minimum_python#*.}
    if [ -n "${PYTHON:-}" ]; then set -- "$PYTHON"; else set -- python3 python python3.14 python3.13 python3.12 python3.11; fi
    for candidate in "$@"; do
        # Inside a virtual environment, ask for the Python that it was made from: .venv must not be made from itself.
        found=$("$candidate" -c 'import platform, sys
print(platform.python_version(), getattr(sys, "_base_executable", None) or sys.executable)' 2>/dev/null) || {
            seen="$seen${PYTHON:+ $candidate does not run;}"
            continue
        }
        version=${found%% *}
        python=${found#* }
        seen="$seen $candidate is $version;"
        rest=${version#*.}
        if [ "${version%%.*}" -eq "$major" ] && [ "${rest%%.*}" -ge "$minor" ]; then
            return
        fi
    done
    fail "Shardlab needs Python $minimum_python or newer, but${seen:- there is none;}" \
        "install one, or name one in the variable PYTHON, as in PYTHON=/path/to/python3 ./run.sh setup."
}

# Takes another MPI than the MPICH of run.lock, in an environment of its own.
choose_mpi() {
    mpi=$1
    case $mpi in
        mpich) ;;
        openmpi | intel) mpi_lock="$root/requirements/mpi/$mpi.lock" venv="$root/.venv-$mpi" ;;
        system) venv="$root/.venv-system" ;;
        *) fail "--mpi is '$mpi', but must be mpich, openmpi, intel or system." ;;
    esac
}

# What an environment can be for. Each needs all that those before it need, and requirements/ has a lock for each.
purposes="run notebook course test docs"

# Makes the environment, unless it is there and was made, to the end, by this Python, in this place; and installs what it lacks for
# a purpose.
setup() {
    local wanted log packages
    [ -f "$root/requirements/$1.lock" ] || fail "there is no requirements/$1.lock, so no environment for '$1':" \
        "$(cd "$root/requirements" && echo *.lock) are there."
    find_python
    wanted="$(cat "$root/requirements/run.lock" "$mpi_lock" | cksum) $version $root"
    if [ ! -x "$venv/bin/python" ] || [ "$(cat "$venv/made-from" 2>/dev/null)" != "$wanted" ]; then
        "$python" -c "import ensurepip, venv" 2>/dev/null || fail "$python cannot make environments, since its module" \
            "'venv' or 'ensurepip' is missing: install it (on Debian and Ubuntu: apt install python${version%.*}-venv)," \
            "or name another Python in the variable PYTHON."
        [ -w "$root" ] || fail "the environment cannot be made, since you may not write in $root:" \
            "copy Shardlab to a folder of your own."
        echo "Making the environment in ${venv##*/} with Python $version; this happens once and takes half a minute or so."
        rm -rf "$venv" 2>/dev/null || fail "the old $venv cannot be removed: remove it, as the user who made it."
        log=$(mktemp "${TMPDIR:-/tmp}/shardlab-setup.XXXXXX")
        "$python" -m venv "$venv" >"$log" 2>&1 || fail "Python's venv failed: $(tail -n 1 "$log") (All it said: $log)"
        rm -f "$log"
        install_for "$1"
        packages=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
        make_command
        echo "$root" >"$packages/shardlab.pth"    # so that `python -m mpi_impl...` works from any folder
        echo "$wanted" >"$venv/made-from"
    elif ! cmp -s "$root/requirements/$1.lock" "$venv/made-for-$1"; then
        echo "Adding to ${venv##*/} what ./run.sh $command needs; this happens once."
        install_for "$1"
    fi
}

# Installs what a purpose needs, and notes it, with what it includes.
install_for() {
    local log purpose lock locks="$root/requirements" status=0
    log=$(mktemp "${TMPDIR:-/tmp}/shardlab-setup.XXXXXX")
    if [ $mpi != mpich ]; then      # the same locks, with this MPI in place of MPICH
        locks=$(mktemp -d "${TMPDIR:-/tmp}/shardlab-locks.XXXXXX")
        for lock in "$root"/requirements/*.lock; do
            awk '/^[^ ]/ { keep = !/^mpich==/ } keep' "$lock" >"$locks/${lock##*/}"
        done
        cat "$mpi_lock" >>"$locks/run.lock"
    fi
    "$venv/bin/python" -m pip install --no-input --disable-pip-version-check --retries 2 --no-compile \
        --require-hashes -r "$locks/$1.lock" 2>&1 | tee "$log" | show_progress || status=$?
    [ $status -eq 0 ] || fail "pip could not install the packages of requirements/$1.lock: is there a network?" \
        "It said: $(grep '^ERROR' "$log" | head -n 1) (All it said: $log)"
    rm -f "$log"
    [ $mpi = mpich ] || rm -r "$locks"
    # On all cores: pip takes one, and three times as long.
    "$venv/bin/python" -m compileall -q -j 0 -x '/tests/' "$venv/lib" >/dev/null 2>&1 || true
    for purpose in $purposes; do
        cp "$root/requirements/$purpose.lock" "$venv/made-for-$purpose"
        [ "$purpose" != "$1" ] || break
    done
}

# Reads what pip says, shows the name of each package as it comes to it.
show_progress() {
    local word package rest
    while read -r word package rest; do
        if [ "$word" = Collecting ]; then printf "%s " "${package%%[=<>]*}"; fi
        if [ "$word" = Installing ]; then printf "\nInstalling ..."; fi
    done
    printf "\n"
}

# The command that pip would make of [project.scripts]. Without -P it would be that of a clone in the current folder.
make_command() {
    printf '#!/usr/bin/env bash\nexec %q -P -m shardlab "$@"\n' "$venv/bin/python" \
        >"$venv/bin/shardlab"
    chmod +x "$venv/bin/shardlab"
}

# Lint, types and tests: each one speaks, whatever the others found, and pytest's closing line is the last.
check() {
    local status=0 place
    cd "$root"
    for place in . .mypy_cache .ruff_cache .pytest_cache; do
        if [ -e $place ] && [ ! -w $place ]; then  # another user's: do without caches
            export MYPY_CACHE_DIR=/dev/null RUFF_NO_CACHE=true PYTEST_ADDOPTS="-p no:cacheprovider"
        fi
    done
    [ $mpi = mpich ] || "$venv/bin/python" -m shardlab.doctor || return 1      # which says what this MPI lacks
    "$venv/bin/python" -m ruff check || status=1
    "$venv/bin/python" -m isort --check-only --quiet . || { echo "Sort imports with .venv/bin/isort ." && status=1; }
    "$venv/bin/python" -m mypy || status=1
    "$venv/bin/lint-imports" --no-cache >"$venv/storeys.log" || { cat "$venv/storeys.log" && status=1; }
    [ ! -e .git ] || "$venv/bin/python" -m tools.size >"$venv/size.log" || { cat "$venv/size.log" && status=1; }
    # Three files at a time, since many tests wait: long ones first, each with ranks of its own; a later -n in OPTIONS
    # has the last word.
    "$venv/bin/python" -m pytest -n 3 --dist loadfile --no-loadscope-reorder "$@" || status=1
    return $status
}

# The tests of tests/gpu, which run in an emulation otherwise. A GPU is needed, and something to use it with.
check_cuda() {
    local python=${CUDA_PYTHON:-"$venv/bin/python"}
    cd "$root"
    "$python" -c 'import sys; from mpi_impl.comm.device import gpus_here; from reference.errors import UserError
try: print("On", ", ".join(name for _, name in gpus_here()))
except UserError as error: sys.exit(f"error: there is nothing to test on. {error}")' || return 1
    "$python" -m tools.gpu_report "$@"
}

# JupyterLab comes with what .venv has: its python3 kernel, and jupytext, which pairs notebooks with their sources.
# It begins in notebooks/, where links to the rest of the repository lead to its files.
# The settings in notebooks/.jupyter hide what readers do not need: news, nbgrader's panels, jupytext's menu, when a file
# was modified, for which a name would be cut; and they show pages as they read, not their source.
notebook() {
    local first=notebooks/README.md
    echo "Opening JupyterLab in notebooks/, where walkthroughs are numbered. Ctrl-C ends it."
    cd "$root"
    [ -f $first ] || first=notebooks        # students have a page of their own above it
    export JUPYTER_CONFIG_PATH="$root/notebooks/.jupyter${JUPYTER_CONFIG_PATH:+:$JUPYTER_CONFIG_PATH}"
    PATH="$venv/bin:$PATH" exec "$venv/bin/python" -m jupyterlab --ServerApp.root_dir="$root" \
        --LabApp.default_url="/lab/tree/$first" "$@"
}

# Writes the locks of all purposes from the newest versions that suit all of them. Each names the one before it, and
# leaves out what that one pins.
lock() {
    local tools all purpose before=none
    find_python
    tools=$(mktemp -d)
    # shellcheck disable=SC2064  # the folder is known now, and gone from scope when the trap runs
    trap "rm -rf '$tools'" EXIT
    "$python" -m venv "$tools"
    "$tools/bin/python" -m pip install --quiet --disable-pip-version-check uv
    cd "$root"
    : >"$tools/none"
    all="course/pyproject.toml --extra mpich --extra notebook --extra prepare --extra test --extra docs --extra quizzes"
    pin $all --upgrade --output-file "$tools/all"
    set --
    for purpose in $purposes; do
        case $purpose in
            run)    set -- --extra mpich ;;
            course) set -- "$@" course/pyproject.toml ;;
            test)   set -- "$@" --extra prepare --extra test ;;
            docs)   set -- "$@" --extra docs --extra quizzes ;;
            *)      set -- "$@" --extra "$purpose" ;;
        esac
        pin "$@" --constraint "$tools/all" --output-file "$tools/$purpose"
        { [ $before = none ] || echo "-r $before.lock"; } >"requirements/$purpose.lock"
        added "$tools/$before" "$tools/$purpose" >>"requirements/$purpose.lock"
        before=$purpose
    done
    for mpi in openmpi intel; do
        pin --extra $mpi --constraint "$tools/all" --output-file "$tools/$mpi"
        added "$tools/run" "$tools/$mpi" >"requirements/mpi/$mpi.lock"
    done
}

# Prints what the second lock pins, and the first one does not.
added() {
    awk 'FILENAME == ARGV[1] { if (/^[^ ]/) pinned[$1] = 1; next } /^[^ ]/ { keep = !($1 in pinned) } keep' "$1" "$2"
}

# Lets uv choose versions for all systems, and print their hashes without an address.
pin() {
    "$tools/bin/uv" pip compile pyproject.toml --quiet --universal --python-version "$minimum_python" \
        --generate-hashes --no-emit-index-url --no-emit-package shardlab --no-annotate --no-header "$@"
}

command=${1:-help}
[ $# -eq 0 ] || shift
if [ "${1:-}" = --mpi ]; then choose_mpi "${2:-}" && shift 2; fi
case $command in
    notebook)   setup notebook; notebook "$@" ;;
    labs)       setup course; "$venv/bin/python" -m course.grading.release "$@" ;;
    docs)       setup docs; "$venv/bin/python" "$root/tools/build_site.py" ;;
    slides)     setup docs; "$venv/bin/python" "$root/tools/slides.py" "$@" ;;
    setup)      setup "${1:-run}"; echo "The environment is ready: $venv" ;;
    demo)       setup run; "$venv/bin/shardlab" demo "$@" ;;
    test)       setup test; check "$@" ;;
    test-all)   setup test; check --deep "$@" ;;
    test-cuda)  [ -n "${CUDA_PYTHON:-}" ] || setup test; check_cuda "$@" ;;
    lock)       lock ;;
    help | -h | --help) echo "$usage" ;;
    *)          echo "$usage" >&2; fail "there is no command '$command'." ;;
esac
